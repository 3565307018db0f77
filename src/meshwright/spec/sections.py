"""The sections of a recipe file, one frozen dataclass each. `docs/recipe.md` is printed from this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.spec.keys import Table, key, open_table

MODEL_NAMES = ("llama", "gpt2")
DATA_SOURCES = ("python-stdlib", "text", "tokens")
SCHEDULE_NAMES = ("constant", "linear", "cosine", "wsd")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
KEYS_OF_OTHER_MODELS = {"llama": ("max_seq_len",), "gpt2": ("n_kv_heads", "head_dim", "rope_theta")}
PP_SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleaved-zero-bubble", "zbv")
CHUNKED_SCHEDULES = ("interleaved1f1b", "interleaved-zero-bubble", "zbv")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """`[model]`: what is trained. Exactly one of `name`, `hf` and `build`."""

    name: str | None = key("A reference model.", None, choices=MODEL_NAMES)
    hf: str | None = key(
        "A causal language model of Hugging Face: a folder with `config.json`, and with safetensors weights to start "
        "from if there are some; or a hub id. Needs the `hf` extra.",
        None,
    )
    build: str | None = key(
        "`package.module:function` that returns an `nn.Module`; the section's other keys are its keyword arguments.",
        None,
    )
    n_layers: int = key("Transformer blocks.", 4, least=1)
    d_model: int = key("Width of the residual stream.", 128, least=1)
    n_heads: int = key("Query heads.", 4, least=1)
    n_kv_heads: int | None = key("Key and value heads (llama); divides n_heads.", None, least=1, left_out="n_heads")
    head_dim: int | None = key(
        "Width of one head (llama); even, for the rotary embedding.", None, least=1, left_out="d_model / n_heads"
    )
    d_ff: int | None = key(
        "Width of the feed-forward layer.",
        None,
        least=1,
        left_out="gpt2: 4 d_model; llama: 8/3 d_model, rounded up to a multiple of 8",
    )
    vocab_size: int | None = key("Rows of the embedding.", None, least=1, left_out="what the tokenizer needs")
    max_seq_len: int | None = key("Learned positions (gpt2).", None, least=1, left_out="data.seq_len")
    dropout: float = key("Probability that an activation is dropped.", 0.0, least=0.0, below=1.0)
    tied_embeddings: bool | None = key(
        "The head uses the embedding's weight.", None, left_out="gpt2: true; llama: false"
    )
    norm_eps: float = key("Epsilon of LayerNorm or RMSNorm.", 1e-5, above=0.0)
    rope_theta: float = key("Base of the rotary embedding (llama).", 10000.0, above=0.0)
    arguments: Table = open_table("Keyword arguments of `build`.")  # noqa: RUF009 -- a field, as with key()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """`[data]`: what it is trained on. `source`, or `build` for any map-style dataset."""

    source: str | None = key(
        "Where rows come from.", None, choices=DATA_SOURCES, left_out="python-stdlib, if `build` is left out too"
    )
    build: str | None = key(
        "`package.module:function` that returns a map-style dataset; undeclared keys are its keyword arguments.",
        None,
    )
    path: str | None = key("File, folder or glob of the `text` source; file of the `tokens` source.", None)
    tokenizer: str | None = key(
        "`bytes`, or the path of a `tokenizers` JSON file (needs the `hf` extra).", None, left_out="bytes"
    )
    token_dtype: str = key(
        "Integer type of the ids in a `tokens` file.", "uint16", choices=("uint8", "uint16", "uint32", "int32", "int64")
    )
    seq_len: int = key("Tokens per row that the model sees.", 128, least=1)
    pack: bool = key(
        "true: documents are joined and cut into full rows; false: one document a row, padded, padding labels ignored.",
        True,
    )
    shuffle: bool = key("Each epoch has its own order, a function of (seed, epoch).", True)
    last_batch: str = key("What becomes of an epoch's incomplete last global batch.", "drop", choices=("drop", "keep"))
    workers: int | None = key(
        "Loader processes per rank for a `build` dataset; 0 loads in the training process.",
        None,
        least=0,
        left_out="1 for `build`; the other sources have none",
    )
    arguments: Table = open_table("Keyword arguments of `build`.")  # noqa: RUF009 -- a field, as with key()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSection:
    """`[loss]`: optional; without it, cross-entropy over the label tokens."""

    build: str | None = key(
        "`package.module:function`: f(model, batch) -> (sum, count), or a list of such pairs.",
        None,
        left_out="token cross-entropy",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection:
    """`[batch]`: how many samples an optimizer step sees, on any number of processes."""

    global_batch_size: int = key("Samples (sequences) per optimizer step, over all processes.", least=1)
    microbatch_size: int | None = key(
        "Samples per forward pass on one data-parallel rank.",
        None,
        least=1,
        knob=True,
        left_out="the largest divisor up to 8 of what a rank gets; smaller if a planned layout needs it to fit",
    )
    tuned_global_batch_size: int | None = key(
        "The global batch that `optimizer.lr` was tuned at; used by `optimizer.lr_scaling`.", None, least=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """`[optimizer]`: one of torch.optim, by name."""

    name: str = key("The optimizer; the section's other keys are its arguments, as torch.optim names them.", "adamw")
    build: str | None = key(
        "`package.module:function`, in place of a name: f(groups, lr=..., the section's other keys) -> Optimizer.",
        None,
    )
    lr: float = key("Peak learning rate.", least=0.0)
    max_grad_norm: float | None = key(
        "Gradients are scaled so that their global 2-norm is at most this.", None, above=0.0, left_out="no clipping"
    )
    lr_scaling: str = key(
        "How lr follows the global batch when it differs from `batch.tuned_global_batch_size`.",
        "none",
        choices=("none", "linear", "sqrt"),
    )
    groups: tuple[Table, ...] = key(
        "Tables of `pattern` (of parameter names, as in `*.bias`) and the options that differ for the parameters it "
        "matches; the first match counts.",
        (),
    )
    options: Table = open_table("Arguments of the optimizer.")  # noqa: RUF009 -- a field, as with key()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSection:
    """`[schedule]`: the learning rate as a function of the optimizer step."""

    name: str = key("Shape after the warm-up.", "constant", choices=SCHEDULE_NAMES)
    warmup_steps: int = key("Steps of linear rise to the peak.", 0, least=0)
    decay_steps: int | None = key(
        "Steps of the final decay (wsd).", None, least=1, left_out="a tenth of train.steps, at least 1"
    )
    final_fraction: float = key("Share of the peak that linear, cosine and wsd end at.", 0.0, least=0.0, most=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSection:
    """`[precision]`: masters are fp32 (fp64 for fp64); compute runs on parameters and inputs cast to this."""

    compute: str = key("Type of forward and backward.", "fp32", choices=PRECISIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """`[cluster]`: optional; without it, this machine."""

    nodes: int = key("Machines.", 1, least=1, knob=True)
    devices_per_node: int | None = key("Devices in each.", None, least=1, knob=True, left_out="what this machine has")
    device: str | None = key(
        "Kind of device, a name of the catalogue (`meshwright cluster list`), or a cluster's TOML file.",
        None,
        knob=True,
        left_out="this machine's",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSection:
    """`[layout]`: how it is cut; the only thing that varies. Left out: planned for this machine (docs/plan.md)."""

    dp_replicate: int | None = key(
        "Replicas that hold whole weights or whole shard groups.",
        None,
        least=1,
        knob=True,
        left_out="what --nproc leaves",
    )
    dp_shard: int = key("Ranks over which ZeRO cuts.", 1, least=1, knob=True)
    zero_stage: int | None = key(
        "0: nothing cut; 1: optimizer state; 2: + gradients; 3: + parameters.",
        None,
        least=0,
        most=3,
        knob=True,
        left_out="0 if dp_shard is 1, else 3",
    )
    units: str | None = key(
        "Modules that ZeRO gathers one at a time: patterns of names such as `encoder.layers.*`, blanks between.",
        None,
        knob=True,
        left_out="the model's repeated blocks",
    )
    tp: int = key("Ranks over which every matrix is cut.", 1, least=1, knob=True)
    pp: int = key("Pipeline stages.", 1, least=1, knob=True)
    tensor: Table | None = key(  # noqa: RUF009 -- a field, as with key()
        "How tp cuts a model of your own: a table of patterns of module or parameter names, such as `layers.*.up`, "
        "each with a style: `column`, `row`, `vocabulary`, `head`, `partial`, ... (spec/tensor_rules.py has them "
        "all); `column:8` cuts 8 whole heads.",
        None,
        knob=True,
        left_out="the model's own rules",
    )
    pp_schedule: str = key(
        "Order of the pipeline's forward and backward passes.", "1f1b", choices=PP_SCHEDULES, knob=True
    )
    pp_chunks: int | None = key(
        "Model chunks that a stage of an interleaved schedule holds; zbv always has 2.",
        None,
        least=2,
        knob=True,
        left_out="2 for interleaved1f1b, interleaved-zero-bubble and zbv, else 1",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """`[train]`: how long, from which seed, and how it runs."""

    steps: int = key("Optimizer steps of the whole training; schedules end here.", least=1)
    stop_after: int | None = key(
        "End cleanly at this step, with a checkpoint and the schedule unchanged.",
        None,
        least=1,
        knob=True,
        left_out="steps",
    )
    seed: int = key("Seeds initial weights, sample order and dropout.", 0, least=0)
    reduction: str = key(
        "fast: sums in any order; exact: bit-identical on any number of ranks.", "fast", choices=("fast", "exact")
    )
    recompute: str = key(
        "What backward computes again instead of keeping; left out beside an open layout, it is planned with it.",
        "none",
        choices=("none", "selective", "full"),
        knob=True,
    )
    sync: str | None = key(
        "When accumulating, reduce gradients over the ranks at the last microbatch (less traffic) or at each (less "
        "memory).",
        None,
        choices=("last", "every"),
        knob=True,
        left_out="every with ZeRO stages 2 and 3, else last",
    )
    record_samples: bool = key("Write the sample ids of each step to samples.jsonl.", False, knob=True)
    on_nonfinite: str = key(
        "What a loss or gradient norm that is NaN or infinite does.", "stop", choices=("stop", "skip")
    )
    threads_per_rank: int = key(
        "CPU threads of each rank; sums over another number of threads round differently.", 1, least=1
    )
    timeout_s: float = key(
        "A rank that does not answer for this long is named and the run ends.", 50.0, least=1.0, knob=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSection:
    """`[validation]`: optional; a part of the data that is never trained on."""

    every_steps: int | None = key(
        "Validate after each such number of steps, and at the end.",
        None,
        least=1,
        knob=True,
        left_out="only at the end, if fraction is above 0",
    )
    fraction: float = key(
        "Share of the samples that is held out; it decides what is trained on, so it stays.", 0.0, least=0.0, most=0.9
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """`[checkpoint]`: what a run can be continued from. The last step always has one."""

    every_steps: int | None = key(
        "Save after each such number of steps.", None, least=1, knob=True, left_out="only at the end"
    )
    keep_last: int = key("Older checkpoints are removed once this many newer ones are whole.", 3, least=1, knob=True)
    asynchronous: bool = key("Save while training goes on.", False, knob=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSection:
    """`[record]`: what rank 0 writes besides metrics.jsonl and summary.json."""

    tensorboard: bool = key(
        "Write TensorBoard event files into the run folder (needs the `tensorboard` extra).", False, knob=True
    )
    memory: bool = key("Measure the memory of one early step, and write it to memory.json.", True, knob=True)


Section = Any
"""Any of the section dataclasses above."""
