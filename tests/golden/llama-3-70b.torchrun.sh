# torchrun lines, made by plait export.
# llama-3-70b on h100x64: 64 processes, global batch 1024 x 8192 tokens, bf16.
# On every node: set HEAD to the first node's name or address, NODE to the node's number as given below,
# and start the line of that node. All nodes need the same plan and the run folder on a shared disk.
# NODE: nodes 0 to 7
torchrun --nnodes 8 --nproc-per-node 8 --node-rank "$NODE" --master-addr "$HEAD" --master-port 29500 -m cli train plan.json --out runs/first
