"""Bytes beyond what is kept at the peak of one module's own computing, as this project's executor computes it.

Backward works in phases; each frees what it was the last to need and leaves gradients for the next.
"""

from __future__ import annotations

from functools import lru_cache

from cost_models.activations import ACTIVATION_BYTES, activation_bytes
from cost_models.context import key_tokens, piece_sums
from cost_models.dispatch import EXPERT_NUMBER_BYTES, dispatched_tokens
from cost_models.flops import gathered_width, local_kv_heads, routed_tokens
from cost_models.share import Share
from specs.cluster import Precision
from specs.model import Attention, Embedding, Head, LatentAttention, Mamba2, Mlp, Module, Moe
from specs.plan import Recompute
from specs.tensors import local_num_elements

MAX_LOGIT_ELEMENTS = 2**26  # the head computes its logits in pieces of this size


@lru_cache(maxsize=65536)
def working_bytes(module: Module, share: Share, precision: Precision, recompute: Recompute = "none") -> int:
    """Extra bytes at the peak of a module's own computing, beyond what `activation_bytes` counts with that recompute.

    # full: what it brings back, and the working memory of keeping all
    """
    match module:
        case Embedding():
            return _embedding(module, share, precision)
        case Head():
            working = _head(module, share, precision)
        case Attention():
            working = _attention(module, share, precision, selective=recompute == "selective")
        case Mlp():
            working = _mlp(module, share, precision, selective=recompute == "selective")
        case Moe():
            working = _moe(module, share, precision, recompute)
        case LatentAttention():
            working = _latent_attention(module, share, precision)
        case Mamba2():
            working = _mamba(module, share, precision)
    if recompute == "full" or (recompute == "selective" and isinstance(module, LatentAttention | Mamba2)):
        whole, kept = (activation_bytes(module, share, precision, mode) for mode in ("none", recompute))
        working += whole - kept
    return working


def _embedding(module: Embedding, share: Share, precision: Precision) -> int:
    """# gradients of the output and of the rows; in a block of several the gathered gradient, then it masked"""
    size = ACTIVATION_BYTES[precision]
    weight, chunk = local_num_elements(module, share.units), share.chunk_tokens * module.hidden
    gathered = share.block_tokens * module.hidden
    return size * (chunk + (gathered + max(gathered, weight) if share.degree > 1 else weight))


def _head(module: Head, share: Share, precision: Precision) -> int:
    """In forward, which forms gradients at once.

    # normalised input c h, gathered input and its gradient 2 T h in a block of several, a piece of P tokens of logits
    #   in fp32 (in place where activations are that too), with a cap two more for its slope; less the gradient of the
    #   weight v h, which the first piece does not have yet, where there are no others
    """
    size, units = ACTIVATION_BYTES[precision], share.units.size
    piece = min(share.block_tokens, max(1, MAX_LOGIT_ELEMENTS // units))
    gathered = 2 * share.block_tokens * module.hidden if share.degree > 1 else 0
    wide = 12 if module.logit_cap is not None else 4 if size == 4 else size + 4
    early = units * module.hidden if piece == share.block_tokens else 0
    logits = max(wide * piece * units - size * early, size * piece * units)
    return size * (share.chunk_tokens * module.hidden + gathered) + logits


def _mlp(module: Mlp, share: Share, precision: Precision, *, selective: bool) -> int:
    """The largest of its phases, each beside the gradient of the output, a c h:

    # second product   its gathered gradient T h, gradients of the columns and of the weight  T f + h f
    # activation       gradients of gate and up and two products of them  3 T f  (no gate: T f)
    # first product    gathered input, gradient of the input  T h (+ c h), gradients of the weights, less T f
    # norm of the output, where there is one: 4 c h more
    # selective: activation and second product at once, with the columns again: T h + 5 T f (no gate: 3 T f); first
    #   product less nothing
    # squared relu keeps its root where it is formed again, with a gate or selective: T f more
    """
    size, gated = ACTIVATION_BYTES[precision], module.gated
    chunk, gathered, own = _tokens(module.hidden, share)
    columns = share.block_tokens * share.units.size
    matrix = module.hidden * share.units.size
    second = gathered + columns + matrix
    root = module.activation == "relu2"
    activation = (3 + root if gated else 1) * columns
    if selective:
        second, activation = 0, gathered + ((5 if gated else 3) + root) * columns
    first = own + (1 + gated) * matrix - (0 if selective else columns)
    after = 4 * chunk if module.post_norm else 0
    return size * (chunk + max(second, activation, first, after))


def _attention(module: Attention, share: Share, precision: Precision, *, selective: bool) -> int:
    """As `_mlp`, with q heads of queries and k of keys and values in place of columns:

    # output product   T h + (T + h) q d
    # scores           gradients of the output, the queries, the keys and values  (2 T q + 2 K k) d; in several pieces
    #                  also those of the largest one's; with a cap two of its scores' in fp32 less output and values,
    #                  8 N q
    # projections      T h (+ c h) + h (q + 2 k) d, less T q d
    # norm of the output, where there is one: 4 c h more
    # selective: T h and the output, normalised (twice) and rotated queries, keys and values again beside the scores'
    #   gradients; with a cap all that is not kept, and the scores once more; projections less nothing
    #   K tokens whose keys and values the rank has, N pairs of the largest piece
    """
    size, tokens = ACTIVATION_BYTES[precision], share.block_tokens
    chunk, gathered, own = _tokens(module.hidden, share)
    queries = share.units.size * module.head_dim
    keys = local_kv_heads(module, share.units) * module.head_dim
    sums, held = piece_sums(module, share), key_tokens(share)
    scores = size * (2 * tokens * queries + 2 * held * keys)
    if sums.pieces > 1:
        scores += size * 2 * sums.most_keys * keys
    if module.score_cap is not None:
        scores = 8 * share.units.size * sums.most_pairs - 2 * size * tokens * queries
        if sums.pieces > 1:
            scores += 2 * size * (tokens + held) * queries
    if selective and module.score_cap is not None:
        whole, kept = (activation_bytes(module, share, precision, mode) for mode in ("none", "selective"))
        scores += size * gathered + whole - kept + size * share.units.size * sums.most_pairs
    elif selective:
        rotated = queries + 2 * keys if module.rope_theta is not None else 0
        normed = queries + keys if module.qk_norm else 0
        scores += size * (gathered + tokens * (queries + rotated + 2 * normed))
        if held > tokens:
            scores += size * 2 * held * keys
    output = 0 if selective else gathered + (tokens + module.hidden) * queries
    projections = own + module.hidden * (queries + 2 * keys) - (0 if selective else tokens * queries)
    after = 4 * chunk if module.post_norm else 0
    return max(size * output, scores, size * projections, size * after) + size * chunk


def _moe(module: Moe, share: Share, precision: Precision, recompute: Recompute) -> int:
    """Its phases beside the gradient of the output, c h; backward the shared experts on own tokens come first, then the
    routed ones one by one.

    # forward  the experts' outputs, and weighted  2 R h;  their sums, A h;  in a block of several what arrived
    # shared   gradients of the columns  3 c f'
    # sums     gradients of the sums, of the outputs and their product with them  R (3 h + 1)
    # columns  of one expert, as in an MLP, and the gradient of its second matrix  3 R f / u + h f;  beside it what
    #          those before have left and freed, each  3 h f + R h / u - 3 R f / u;  with the last one go the sums'
    # weights  gradients of all matrices and of one kind stacked, and of what arrived  4 u h f + A h;  less columns,
    #          outputs and inputs of the experts  R (3 f + 2 h)
    #   less the shared ones' columns, 3 c f', which are not there yet or gone
    # selective: with what that brings back and what arrived; in the forward phase also the sums' gradients, A h
    #   A tokens that arrive; in a block of several with weights and numbers of their experts, A (a h + (a + 8) e)
    """
    size, units, hidden = ACTIVATION_BYTES[precision], share.units.size, module.hidden
    routed = routed_tokens(module, share.block_tokens, share.units)
    arrived = dispatched_tokens(module, share.block_tokens, share.units)
    inputs = arrived * (size * hidden + (size + EXPERT_NUMBER_BYTES) * module.experts_per_token)
    if share.degree == 1:
        inputs = 0.0  # the normalised chunk, which is kept
    matrix, columns = hidden * module.expert_ffn, routed * module.expert_ffn / units
    each = 3 * matrix + routed * hidden / units - 3 * columns
    before = max(i * each - (routed * hidden if i == units - 1 else 0) for i in {0, max(0, units - 2), units - 1})
    backward = size * max(
        routed * (3 * hidden + 1),
        3 * columns + matrix + before,
        4 * units * matrix + arrived * hidden - routed * (3 * module.expert_ffn + 2 * hidden),
    )
    forward = size * (2 * routed + arrived) * hidden + inputs
    if recompute == "selective":
        whole, kept = (activation_bytes(module, share, precision, mode) for mode in ("none", recompute))
        backward += whole - kept + inputs
        forward += whole - kept + size * arrived * hidden
    shared = 3 * size * share.chunk_tokens * module.shared_ffn
    return round(size * share.chunk_tokens * hidden + max(shared, max(forward, backward) - shared))


def _latent_attention(module: LatentAttention, share: Share, precision: Precision) -> int:
    """A formula: no executor that was measured runs this module.  Gathered vectors and gradient, inner gradients,
    gradients of the weights.
    """
    size, tokens, units = ACTIVATION_BYTES[precision], share.block_tokens, share.units
    both = tokens * (gathered_width(module) + module.hidden)
    gathered = both if share.degree > 1 else share.chunk_tokens * module.hidden
    inner = tokens * 2 * units.size * (module.key_dim + module.value_dim)
    return size * (gathered + inner + local_num_elements(module, units))


def _mamba(module: Mamba2, share: Share, precision: Precision) -> int:
    """A formula: no executor that was measured runs this module.  Phases as of `_mlp`, with D, S, H of `_mamba_bytes`:

    # output product   T h + (T + h) D
    # scan             gradients of gate, output, values, B, C and steps  T (3 D + S + H); states of chunks and their
    #                  gradients in fp32, 8 D N T / Q
    # in-projection    T h (+ c h) + h (2 D + S + H), less T D
    """
    size, tokens, heads = ACTIVATION_BYTES[precision], share.block_tokens, share.units.size
    chunk, gathered, own = _tokens(module.hidden, share)
    inner, shared = heads * module.head_dim, 2 * local_kv_heads(module, share.units) * module.state_size
    chunks = -(-tokens // min(module.chunk, share.seq_len))
    output = gathered + (tokens + module.hidden) * inner
    scan = tokens * (3 * inner + shared + heads)
    projection = own + module.hidden * (2 * inner + shared + heads) - tokens * inner
    states = 8 * inner * module.state_size * chunks
    return size * chunk + max(size * output, size * scan + states, size * projection)


def _tokens(hidden: int, share: Share) -> tuple[int, int, int]:
    """Elements of the rank's chunk, of a gathered gradient (0 in a block of one), and of a first product's input and
    its gradient: the chunk alone, or the gathered one and the chunk again.
    """
    chunk, block = share.chunk_tokens * hidden, share.block_tokens * hidden
    return (chunk, block, block + chunk) if share.degree > 1 else (chunk, 0, chunk)
