"""
Bytes of memory that a run takes, part by part, from what the libraries below keep.

Every figure is counted from tensors, none is fitted: which ones stands beside each. What no tensor explains, the
interpreter with its libraries, is measured: of the trainer in the planning process itself, which imports the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from .architecture import Architecture
from .launch import Launch

GIB = 2**30
PAGE = 4096
HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""Tile of the logits that TRL's fused LM head holds at once (`trl/kernels/chunked_logprob.py`)."""
HEAD_TEMPORARIES = 29
"""Bytes per logit of the tile's backward without Triton: five float32 arrays, two more in flight, and one mask."""
CUDA_CONTEXT = GIB // 2
"""Of one process on one device: the CUDA context with the kernels loaded, NCCL aside."""
PUBLISHED_SHARD = 4 * GIB
"""Weights that the main process holds in host memory while it writes a policy (`phases.MAX_SHARD_BYTES`)."""


@dataclass(frozen=True)
class Workload:
    """
    What one rank computes with.

    Args:
        weight_bytes (`int`): of a parameter as trained (4: float32 master weights).
        compute_bytes (`int`): of a parameter in the forward pass.
        microbatch_tokens (`int`): most tokens forwarded at once, prompt and padding included.
        checkpointing (`bool`): whether activations are computed again in the backward pass.
        trainable (`int`): parameters with gradient and optimizer state.
        reference (`bool`): whether a reference model is loaded as well.
        sync_once (`bool`): gradients are synchronized once an update, not once a micro-batch.
        offload (`bool`): training state leaves the device while the engine generates.
        on_cpu (`bool`): the device is the host.
    """

    weight_bytes: int
    compute_bytes: int
    microbatch_tokens: int
    checkpointing: bool
    trainable: int
    reference: bool = False
    sync_once: bool = True
    offload: bool = True
    on_cpu: bool = False


def training_state(a: Architecture, work: Workload, launch: Launch) -> dict[str, int]:
    """What one rank holds between two updates: parameters and the optimizer's state."""
    if launch.sharding in ("zero2", "zero3") and work.compute_bytes < 4:  # DeepSpeed keeps float32 masters beside
        stored, state = work.compute_bytes, 12
    else:
        stored, state = work.weight_bytes, 2 * work.weight_bytes
    parameters = a.num_parameters * stored // launch.parameter_shards
    if work.reference:
        parameters += a.num_parameters * work.compute_bytes // launch.parameter_shards
    return {"parameters": parameters, "optimizer": work.trainable * state // launch.optimizer_shards}


def optimization(a: Architecture, work: Workload, launch: Launch) -> dict[str, int]:
    """Peak of one rank in an update: in the backward pass, at the head of the last micro-batch."""
    parts = training_state(a, work, launch)
    parts["gradients"] = gradients(work, launch)
    parts["gathered or cast weights"] = gathered_weights(a, work, launch)
    parts["activations"] = work.microbatch_tokens * activations_per_token(a, work)
    parts["LM head"] = head(a, work)
    if not work.on_cpu:
        parts["CUDA context"] = CUDA_CONTEXT
    return parts


def gradients(work: Workload, launch: Launch) -> int:
    """Gradients of one rank, communication buffers included."""
    whole = work.trainable * work.weight_bytes
    if launch.sharding == "fsdp2":  # without a synchronization each micro-batch, they pile up unsharded
        return whole // launch.num_processes + (work.trainable * work.compute_bytes if work.sync_once else 0)
    if launch.sharding in ("zero2", "zero3"):
        return work.trainable * work.compute_bytes // launch.num_processes + 2 * min(500_000_000, work.trainable)
    return 2 * whole if launch.sharding == "ddp" else whole  # DDP's buckets are a copy


def gathered_weights(a: Architecture, work: Workload, launch: Launch) -> int:
    """Weights in the form the forward pass uses, where that is another than what the rank stores."""
    if launch.sharding == "fsdp2":  # embeddings and head stay gathered, layers come one ahead
        return work.compute_bytes * (a.outer_parameters + 2 * a.layer_parameters)
    if launch.sharding == "zero3":  # `stage3_max_live_parameters`
        return work.compute_bytes * min(a.num_parameters, 1_000_000_000)
    if launch.sharding == "zero2" or work.compute_bytes == work.weight_bytes:
        return 0
    return work.compute_bytes * (a.num_parameters - a.outer_parameters)  # autocast's cache of cast weights


def activations_per_token(a: Architecture, work: Workload) -> int:
    """Bytes that one token leaves for the backward pass, over all layers."""
    per_layer = layer_activations(a, work)
    if work.checkpointing:  # the layers' inputs, and one layer computed again
        return a.layers * a.hidden * residual_bytes(work) + per_layer
    return a.layers * per_layer


def residual_bytes(work: Workload) -> int:
    """Of one number of the residual stream: float32 under autocast, as embeddings are not cast."""
    return max(work.weight_bytes, work.compute_bytes)


def layer_activations(a: Architecture, work: Workload) -> int:
    """
    What autograd keeps of one token in one layer with RMS norms, rotary embeddings and a gated MLP.

    Two norms: input, normalized input, and what follows reads (one copy for each of five projections under autocast).
    Attention: rotated queries and keys, values, the output, and its contiguous copy. MLP: gate, its activation, up,
    and their product.
    """
    c, residual = work.compute_bytes, residual_bytes(work)
    reads = 5 * a.hidden * c if c < residual else 2 * a.hidden * c
    norms = 4 * a.hidden * residual + reads
    attention = (3 * a.query + 2 * a.key_value) * c
    return norms + attention + 4 * a.intermediate * c


def head(a: Architecture, work: Workload) -> int:
    """The fused LM head in the backward pass: one tile of logits, float32 gradients of weight and hidden states."""
    rows, columns = min(work.microbatch_tokens, HEAD_TOKENS), min(a.vocabulary, HEAD_COLUMNS)
    tile = rows * max(columns * work.compute_bytes, PAGE)  # rows of a wider buffer: at least a page of each is touched
    if work.on_cpu:
        tile += rows * columns * HEAD_TEMPORARIES
    return tile + 4 * a.head_parameters + 4 * work.microbatch_tokens * a.hidden


def cache_per_token(a: Architecture, number_bytes: int) -> int:
    """Keys and values of one token, over all layers."""
    return 2 * a.layers * a.key_value * number_bytes


def in_process_rollout(a: Architecture, work: Workload, launch: Launch, rows: int, context: int) -> dict[str, int]:
    """
    Peak of one rank that generates `rows` responses at once: the cache at its full length, just grown from half of it
    (both are there for a moment in one layer), and the log-probs of one step.
    """
    parts = training_state(a, work, launch)
    if launch.parameter_shards > 1:
        parts["whole copy of the policy"] = a.num_parameters * work.weight_bytes
    cache = rows * context * cache_per_token(a, work.compute_bytes)
    parts["KV cache"] = cache + cache // (2 * a.layers)
    parts["logits"] = rows * a.vocabulary * (work.compute_bytes + 3 * 4)
    if not work.on_cpu:
        parts["CUDA context"] = CUDA_CONTEXT
    return parts


@dataclass(frozen=True)
class ServerMemory:
    """One device of a vLLM server: the bytes it takes, those of weights and KV cache, and the tokens in the cache."""

    taken: int
    weights: int
    cache: int
    cache_tokens: int


def server(
    a: Architecture, device_bytes: int, share: float, tensor_parallel: int, number_bytes: int, batched_tokens: int
) -> ServerMemory:
    """
    What a vLLM server makes of a device.

    Args:
        a (`Architecture`): of the policy.
        device_bytes (`int`), share (`float`): the device's memory, and the share of it that vLLM takes.
        tensor_parallel (`int`): devices of one server.
        number_bytes (`int`): of a weight and of a number in the cache.
        batched_tokens (`int`): tokens of one step of the engine, whose activations and logits it sets aside.
    """
    taken = int(device_bytes * share)
    weights = a.num_parameters * number_bytes // tensor_parallel
    width = max(a.query + 2 * a.key_value, 2 * a.intermediate) + 2 * a.hidden
    activations = batched_tokens * width * number_bytes // tensor_parallel + CUDA_CONTEXT
    logits = min(batched_tokens, 1024) * a.vocabulary * 4 // tensor_parallel
    cache = max(0, taken - weights - activations - logits)
    return ServerMemory(taken, weights, cache, cache * tensor_parallel // cache_per_token(a, number_bytes))


def published(a: Architecture, work: Workload, untied: bool) -> int:
    """Host memory of the main process while it writes a policy: its weights, a shard at a time."""
    size = a.num_parameters * work.weight_bytes + (a.head_parameters * work.weight_bytes if untied and a.tied else 0)
    return min(size, PUBLISHED_SHARD)
