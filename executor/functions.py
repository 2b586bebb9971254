"""The autograd functions of a block: forward and backward are mirror images.

    gather_linear   forward  all-gather x, y_i = X W_i^T      backward  all-gather x again, reduce-scatter sum dy_i W_i
    linear_scatter  forward  reduce-scatter y W                backward  all-gather dout, dy = dOut W^T

Between modules a rank keeps only its own chunk x; the gathered X lives only while it is needed, unless it is to stay.
Weights lie with the cut dimension as rows: W_i and W are [local rows, hidden].  Their gradients go through the
block's `weight_work`, which may put them off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from executor.collectives import Block

Tensor = torch.Tensor


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: Block, keep: bool, num_weights: int, x: Tensor, *weights_and_biases: Tensor | None):  # type: ignore[no-untyped-def]
        gathered = block.all_gather(x)
        weights, biases = weights_and_biases[:num_weights], weights_and_biases[num_weights:]
        ctx.block, ctx.keep = block, keep
        ctx.parameters = weights
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(gathered if keep else x, *weights)
        return tuple(F.linear(gathered, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
        block, keep = ctx.block, ctx.keep
        x, *weights = ctx.saved_tensors
        x = x.detach()  # what is put off would keep the whole graph, with the virtual stage's input and its gradient

        def of_weights() -> list[Tensor]:
            gathered = x if keep else block.all_gather(x)
            return [grad.t() @ gathered for grad in grads]

        grad_weights = block.weight_work.gradients(ctx.parameters, of_weights)
        grad_x = None
        for grad, weight in zip(grads, weights, strict=True):
            grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
        grad_biases = [grad.sum(dim=0) if has else None for grad, has in zip(grads, ctx.has_bias, strict=True)]
        return (None, None, None, block.reduce_scatter(grad_x), *grad_weights, *grad_biases)


def gather_linear(
    block: Block, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keep: bool
) -> tuple[Tensor, ...]:
    """x [chunk tokens, hidden] -> for each weight [rows, hidden] an output [block tokens, rows].

    `keep`: the gathered x stays for backward, which then need not gather it again.
    """
    return _GatherLinear.apply(block, keep, len(weights), x, *weights, *biases)


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: Block, y: Tensor, weight: Tensor):  # type: ignore[no-untyped-def]
        ctx.block = block
        ctx.parameter = weight
        ctx.save_for_backward(y, weight)
        return block.reduce_scatter(y @ weight)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        y, weight = ctx.saved_tensors
        y = y.detach()  # as above
        gathered = ctx.block.all_gather(grad)
        (grad_weight,) = ctx.block.weight_work.gradients([ctx.parameter], lambda: [y.t() @ gathered])
        return None, gathered @ weight.t(), grad_weight


def linear_scatter(block: Block, y: Tensor, weight: Tensor) -> Tensor:
    """y [block tokens, rows] times weight [rows, hidden], summed over the block -> [chunk tokens, hidden]."""
    return _LinearScatter.apply(block, y, weight)


class _RecomputedCore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: Block, core: Callable[..., Tensor], weight: Tensor, *inputs: Tensor):  # type: ignore[no-untyped-def]
        ctx.block, ctx.core, ctx.parameter = block, core, weight
        ctx.save_for_backward(weight, *inputs)
        return block.reduce_scatter(core(*inputs) @ weight)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        weight, *inputs = ctx.saved_tensors
        gathered = ctx.block.all_gather(grad)
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            y = ctx.core(*leaves)
        grad_inputs = torch.autograd.grad(y, leaves, gathered @ weight.t())
        y = y.detach()
        (grad_weight,) = ctx.block.weight_work.gradients([ctx.parameter], lambda: [y.t() @ gathered])
        return (None, None, grad_weight, *grad_inputs)


def recomputed_core(block: Block, core: Callable[..., Tensor], weight: Tensor, *inputs: Tensor) -> Tensor:
    """linear_scatter(core(*inputs), weight), keeping only the inputs: selective recompute without communication.

    `core` maps the outputs of `gather_linear` to [block tokens, rows]; it must not own weights.
    """
    return _RecomputedCore.apply(block, core, weight, *inputs)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: Block, partial: Tensor):  # type: ignore[no-untyped-def]
        ctx.block = block
        return block.reduce_scatter(partial)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return None, ctx.block.all_gather(grad)


def scatter(block: Block, partial: Tensor) -> Tensor:
    """[block tokens, hidden], a summand from each member -> [chunk tokens, hidden]."""
    return _Scatter.apply(block, partial)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: Block, chunk: Tensor):  # type: ignore[no-untyped-def]
        ctx.block = block
        return block.all_gather(chunk)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return None, ctx.block.reduce_scatter(grad)


def gather(block: Block, chunk: Tensor) -> Tensor:
    """[chunk tokens, hidden] -> [block tokens, hidden]; backward sums the members' gradients."""
    return _Gather.apply(block, chunk)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: Block, rows: Tensor, sent: list[int], received: list[int]):  # type: ignore[no-untyped-def]
        ctx.block, ctx.sent, ctx.received = block, sent, received
        return block.all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return None, ctx.block.all_to_all(grad, ctx.received, ctx.sent), None, None


def exchange(block: Block, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """rows [sum of sent, ...] in members' order -> [sum of received, ...] from them; backward goes the other way."""
    return _Exchange.apply(block, rows, sent, received)


class _AddRows(torch.autograd.Function):
    """torch's index_add keeps its source for backward, which needs no more than the rows' numbers."""

    @staticmethod
    def forward(ctx, source: Tensor, rows: Tensor, num_rows: int):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows)
        return source.new_zeros((num_rows, *source.shape[1:])).index_add_(0, rows, source)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        (rows,) = ctx.saved_tensors
        return grad[rows], None, None


def add_rows(source: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """source [n, ...] summed into row rows[i] of [num_rows, ...] for each i."""
    return _AddRows.apply(source, rows, num_rows)


class _GatedActivation(torch.autograd.Function):
    """y = act(gate) * up, keeping gate and up only (the product is what the next matmul keeps)."""

    @staticmethod
    def forward(ctx, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor):  # type: ignore[no-untyped-def]
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return activation(gate) * up

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        leaf = gate.detach().requires_grad_()
        with torch.enable_grad():
            activated = ctx.activation(leaf)
        (grad_gate,) = torch.autograd.grad(activated, leaf, grad * up)
        return None, grad_gate, grad * activated.detach()


def gated_activation(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up, elementwise."""
    return _GatedActivation.apply(activation, gate, up)


class _SquaredRelu(torch.autograd.Function):
    """y = relu(x)^2, keeping relu(x) only; torch's own square makes one more tensor of that size in backward."""

    @staticmethod
    def forward(ctx, x: Tensor):  # type: ignore[no-untyped-def]
        root = x.relu()
        ctx.save_for_backward(root)
        return root.square()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        (root,) = ctx.saved_tensors
        return (grad * root).mul_(2.0)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) squared, elementwise."""
    return _SquaredRelu.apply(x)


class _RmsNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean x^2 + epsilon), keeping x and r; torch keeps x twice where it has no kernel."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, epsilon: float):  # type: ignore[no-untyped-def]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(dim=0)
        grad = grad * weight
        grad_x = scale * (grad - normed * (grad * normed).mean(dim=-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension (arXiv 1910.07467), by torch's fused kernel where there is one."""
    if x.is_cuda and x.dtype == weight.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, epsilon)
    return _RmsNorm.apply(x, weight, epsilon)


class _Rotate(torch.autograd.Function):
    """Rotary embedding; its backward is the rotation by the negative angle, so nothing is kept but the table."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x)  # in x's own order of dimensions, so that attention's output needs no copy
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half:])
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of the last dimension d by the table's angles [sequence, d/2] (arXiv 2104.09864)."""
    return _Rotate.apply(x, cos, sin)


# Logits of one piece of the token list: few enough to bound memory, many enough to keep the matmul busy.
MAX_LOGIT_ELEMENTS = 2**26


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Fused head and loss over vocabulary rows cut among the block; full logits never exist.

    Per piece of tokens: z = X W^T (own rows), m = max over block, s = sum exp(z - m), loss = log s + m - z_target;
    dz = softmax - onehot at once, so dX and dW are ready when forward ends and no logits are kept.
    """

    @staticmethod
    def forward(
        ctx,
        block: Block,
        row_start: int,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        cap: float | None,
        train: bool,
    ):  # type: ignore[no-untyped-def]
        gathered = block.all_gather(x)
        loss = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        grad_x = torch.empty_like(gathered) if train else None
        grad_weight = None
        piece = max(1, MAX_LOGIT_ELEMENTS // weight.shape[0])
        for start in range(0, gathered.shape[0], piece):
            part = slice(start, start + piece)
            piece_loss, grad_logits = _piece_loss(block, row_start, gathered[part], weight, targets[part], scale, cap)
            loss += piece_loss
            if grad_x is not None:
                torch.mm(grad_logits, weight, out=grad_x[part])
                if grad_weight is None:
                    grad_weight = grad_logits.t() @ gathered[part]
                else:
                    grad_weight.addmm_(grad_logits.t(), gathered[part])
            del grad_logits  # else it lives beside the next piece's
        if grad_x is not None:
            ctx.save_for_backward(block.reduce_scatter(grad_x), grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        # In place: the weight's can be the largest tensor of a stage, and nobody needs it unscaled any more.
        grad_x, grad_weight = (of.mul_(grad.to(of.dtype)) for of in ctx.saved_tensors)
        return None, None, grad_x, grad_weight, *(None,) * 4


def _piece_loss(
    block: Block, row_start: int, x: Tensor, weight: Tensor, targets: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Scaled summed loss of some tokens and the gradient of their logits [tokens, own rows] in x's dtype."""
    logits = x @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = None
    if cap is not None:  # z = cap tanh(u / cap), dz/du = 1 - (z / cap)^2
        logits = logits.div_(cap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(cap)
    largest = block.all_reduce(logits.amax(dim=-1), dist.ReduceOp.MAX)
    local = targets - row_start
    mine = (local >= 0) & (local < weight.shape[0])
    index = local.clamp(0, weight.shape[0] - 1).unsqueeze(-1)
    of_target = logits.gather(-1, index).squeeze(-1).sub_(largest).masked_fill_(~mine, 0.0)
    exponentials = logits.sub_(largest.unsqueeze(-1)).exp_()
    sums = block.all_reduce(torch.stack((exponentials.sum(dim=-1), of_target)))
    loss = (sums[0].log() - sums[1]).sum() * scale
    gradient = exponentials.div_(sums[0].unsqueeze(-1))
    gradient.scatter_add_(-1, index, -mine.to(gradient.dtype).unsqueeze(-1))
    if slope is not None:
        gradient.mul_(slope)
    return loss, gradient.mul_(scale).to(x.dtype)


def vocabulary_cross_entropy(
    block: Block,
    row_start: int,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: float,
    cap: float | None = None,
) -> Tensor:
    """scale * sum over the block's tokens of the cross-entropy, in nats; every member returns the same value.

    x [chunk tokens, hidden]; weight [own vocabulary rows, hidden], the first of which is row `row_start`;
    targets [block tokens]; `cap` c: logits become c tanh(logit / c).
    """
    return _VocabularyCrossEntropy.apply(block, row_start, x, weight, targets, scale, cap, torch.is_grad_enabled())
