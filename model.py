"""The models: loading, token log-probs, the trainer's tri-model, the generator's inference copy.

Where this departs from a trainer beside an inference engine:
1. One process holds three sets of weights: the policy, the reference, and the inference copy, which
   *is* the old policy θ_t: between two weight copies nobody writes to it.
2. Until the first optimizer step the policy equals the old policy, so `old` is `policy.detach()`:
   the ratio is exactly 1 in every dtype, and costs no forward pass.
3. No prompt token meets the head, and no (A, V) tensor of logits is ever alive.
4. Sampling is one uniform a token, drawn on the host from a stream keyed by seed, period, prompt
   and sample. A sampled token does not depend on the row or the step it was sampled in.
5. Over several devices a model is cut into stages, each the base model with a part of its layers;
   no hooks, and the parameters stay the model's own. One device is one stage: the same code.

    load -> policy, frozen_copy -> reference, inference copy
    InferenceCopy: submit -> launch (prefill or decode), finish -> ids and log-probs
    TriModel: packed micro-batch -> log-probs of policy, old, reference
"""
import contextlib
import copy
import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate.hooks import remove_hook_from_submodules
from huggingface_hub import hf_hub_download
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig,
                          LlamaForCausalLM, PreTrainedTokenizerFast)

from attention import Packed, Slots, attach, pack, refuse, upload

HEAD_CHUNK = 2**24       # logits computed at once, in elements: 64 MiB of float32
PREFILL_TOKENS = 4096    # a prefill takes no further prompt from here on
WIDTH_STEP = 16          # decoding attends over a multiple of this many places
TINY_STEPS = 400         # supervised warm-up of the embedded model: about 10 s on two cores

# Read before the first product: else, on some CPUs, MKL's bits depend on the number of threads.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
with contextlib.suppress(AttributeError, TypeError):  # other C libraries have no mallopt
    # glibc returns large freed blocks to the kernel, and the next micro-batch pays page faults for
    # them. M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD; now, for a thread keeps its first arena.
    for option, value in (-8, 1), (-4, 0), (-1, 2**31 - 1):
        ctypes.CDLL(None).mallopt(option, value)


def devices(names: str) -> list[torch.device]:
    """`cpu`, or `npu:0,npu:1`; empty: the first accelerator, else the CPU. Raises ValueError."""
    names = names or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    found = []
    for name in names.split(","):
        try:
            found.append(torch.empty(0, device=name.strip()).device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"no device {name}: {_first_line(error)}") from None
    return found


def stage_edges(layers: int, stages: int) -> list[int]:
    """Where each stage's layers begin, and the end; their numbers differ by one at most."""
    return [round(layers * stage / stages) for stage in range(stages + 1)]


def layout(config, places: Sequence) -> dict:
    """Module name -> device, for stages laid out over `places`. The one rule for an embedding that
    is tied to the head: it stays with the head, on the last device."""
    edges = stage_edges(config.num_hidden_layers, len(places))
    layers = {f"model.layers.{layer}": place for place, first, last in
              zip(places, edges, edges[1:]) for layer in range(first, last)}
    return layers | {"model.embed_tokens": places[-1 if config.tie_word_embeddings else 0],
                     "model.rotary_emb": places[0], "model.norm": places[-1],
                     "lm_head": places[-1]}


def place(model, places: Sequence):
    """Cut a model into stages, one a device: each is the base model with a part of the layers, and
    the last alone has the norm. Returns the model. The parameters stay the model's own."""
    for name, where in layout(model.config, places).items():
        model.get_submodule(name).to(where)
    model.tie_weights()  # on its way to an NPU a parameter becomes a new one
    base, model.stages = model.base_model, []
    edges = stage_edges(len(base.layers), len(places))
    for number, where in enumerate(map(torch.device, places)):
        stage = copy.copy(base)
        stage._modules = dict(base._modules)  # which a shallow copy shares
        stage.layers = base.layers[edges[number]:edges[number + 1]]
        stage.rotary_emb = copy.deepcopy(base.rotary_emb).to(where)
        if number < len(places) - 1:
            stage.norm = torch.nn.Identity()
        model.stages.append((where, stage))
    for layer in base.layers if model.config.hidden_act == "silu" else ():
        layer.mlp.act_fn = _SiLU()
    return model


def plan(stages: int, copies: int, *, model: str, dtype: str, beta: float, recompute: bool,
         rows: int, max_prompt_tokens: int, max_new_tokens: int, micro_batch_tokens: int,
         **_) -> list[dict]:
    """What each stage of the trainer, then each inference copy, will hold: `layers`, and GiB by
    part. No weights are read. Activations are an estimate: 1F1B keeps a micro-batch a stage that
    follows, each with its layers' inputs, and with all they save unless they are recomputed."""
    try:
        config, gib = AutoConfig.from_pretrained(model), 2**30
    except Exception as error:  # as in `load`
        raise ValueError(f"no plan for the model {model}: {_first_line(error)}") from None
    refuse(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    copied, half = frozen_copy(model, getattr(torch, dtype)), getattr(torch, dtype).itemsize
    where, edges = layout(config, range(stages)), stage_edges(config.num_hidden_layers, stages)

    def weights(model, stage):  # a tied one counts once, as the embedding
        return sum(p.nbytes for name, p in model.named_parameters() for module, its in where.items()
                   if name.startswith(f"{module}.") and its == stage) / gib
    hidden, heads = config.hidden_size, config.num_key_value_heads
    size = model.base_model.layers[0].self_attn.head_dim
    # Of a layer: norms and residuals in float32; queries, keys, values, the MLP's in `half`.
    saved = 32 * hidden + half * (4 * config.num_attention_heads * size + 4 * heads * size
                                  + 4 * config.intermediate_size)
    held = []
    for stage in range(stages):
        own = weights(model, stage)
        layers = (stages - stage) * (edges[stage + 1] - edges[stage])  # of all micro-batches kept
        kept = layers * 4 * hidden + saved if recompute else layers * saved
        held.append({"layers": f"{edges[stage]}-{edges[stage + 1] - 1}",
                     "parameters": own, "gradients": own, "Adam": 2 * own,
                     "reference": weights(copied, stage) if beta else 0.0,
                     "activations": micro_batch_tokens * kept / gib,
                     "head": 12 * HEAD_CHUNK / gib if stage == stages - 1 else 0.0})
    slots = 2 * config.num_hidden_layers * heads * size * half * rows * (
        max_prompt_tokens + max_new_tokens)
    whole = sum(p.nbytes for p in copied.parameters()) / gib
    return held + [{"layers": f"0-{edges[-1] - 1}", "weights (also the old policy's)": whole,
                    "slots": slots / gib} for _ in range(copies)]


def load(name: str, device="cpu", dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple:
    """A causal language model in train mode with shared-prompt attention, and its tokenizer.
    `name` is `tiny` (made here, from `seed`), a folder or a hub id; `device` is one, or a list of
    them, over which the layers are laid out as they are read. Dropout is off: with it, the trainer
    would score tokens under another model than sampled them. Raises ValueError that says what is
    wrong with name, architecture or files."""
    places = device if isinstance(device, list) else [device]
    if name == "tiny":
        model, tokenizer = _tiny(seed)
        return place(model.to(dtype), places), tokenizer
    if not Path(name).is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ValueError(f"no model {name}: it must be tiny, a folder or a hub id (owner/name)")
    try:
        config = AutoConfig.from_pretrained(name)
        refuse(config)
        config.attention_dropout = 0.0
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, report = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, use_safetensors=True,
            device_map=layout(config, places), output_loading_info=True)
    except Exception as error:  # each library has its own; the first line says what is missing
        raise ValueError(f"cannot load the model {name}: {_first_line(error)}") from None
    if absent := sorted(report["missing_keys"]):  # transformers would train on with random values
        raise ValueError(f"the model {name} has no weights for {', '.join(absent[:3])}")
    remove_hook_from_submodules(model)  # they would copy the logits back to the first device
    return place(attach(model.train()), places), tokenizer


def fetch(path: str) -> str:
    """The path itself, or that of hub:OWNER/NAME/FILE, a file of a data set, which is downloaded
    once and kept. Raises ValueError that says what to do without a network."""
    if not path.startswith("hub:"):
        return path
    try:
        owner, name, file = path.removeprefix("hub:").split("/", 2)
        return hf_hub_download(f"{owner}/{name}", file, repo_type="dataset")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot fetch {path}, to be hub:OWNER/NAME/FILE: without a network, "
                         f"download it and give its path ({_first_line(error)})") from None


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def stop_ids(model, tokenizer) -> list[int]:
    """Every id that ends a response: those of the generation config, and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    ids = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id}
    return sorted(ids - {None})


def frozen_copy(model, dtype: torch.dtype = torch.float32):
    """A copy without gradients, for reference and generation. With bfloat16, `Linear` weights are
    kept in it, which is what autocast makes of the policy's float32 ones in every product: the bits
    are the policy's at half the memory. All else, a head tied to the embedding too, stays."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    if dtype == torch.bfloat16:
        for module in _linears(model):
            module.to(dtype)
    return model


def _linears(model):
    """All `Linear` modules but a head tied to the embedding."""
    embedding = model.get_input_embeddings().weight
    return [module for module in model.modules()
            if isinstance(module, torch.nn.Linear) and module.weight is not embedding]


class _SiLU(torch.nn.Module):
    """silu whose bits do not depend on the number of threads: those of torch's at one thread.
    torch cuts a tensor into equal parts, one a thread; what of a part fills no vector is computed
    by scalar code, whose exp rounds in another way. So the parts' ends, whose places depend on
    how many threads there are, had other bits. Everything else that a model computes was equal."""

    def forward(self, x):
        # Other devices know no such threads. In memory that has gaps torch's vectors end with rows.
        return _Silu.apply(x.contiguous()) if x.is_cpu else silu(x)


class _Silu(torch.autograd.Function):
    """Two calls of torch's own kernels: all parts of the first fill vectors, and the second is too
    small for a second thread."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _in_two(torch.ops.aten.silu.out, "out", x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _in_two(torch.ops.aten.silu_backward.grad_input, "grad_input", grad.contiguous(),
                       *ctx.saved_tensors)


def _in_two(kernel, name, *inputs):
    """An elementwise kernel over contiguous tensors, its result named `name`. 64 elements, two
    vectors of bfloat16 with AVX-512, are the most that one turn of a kernel's loop takes."""
    output = torch.empty_like(inputs[0])
    *inputs, result = (x.view(-1) for x in (*inputs, output))
    before, first = None, len(result)
    while first != before:  # as the kernel counts its parts: fewer elements may be fewer of them
        parts = max(1, min(torch.get_num_threads(), -(-first // 32768)))
        before, first = first, first - first % (64 * parts)
    for part in slice(first), slice(first, None):
        if len(result[part]):
            kernel(*(x[part] for x in inputs), **{name: result[part]})
    return output


@torch.no_grad()
def exact_threads(model, most: int) -> int:
    """The largest number of threads, `most` at most, with which products of this model have the
    bits of one thread on this CPU. Where results have too few columns for all threads MKL cuts
    them in another way, even if asked to be strict: with 6 threads and 64 columns on an AMD EPYC.
    Tried with the fewest rows of a pass and the narrowest of the matrices: wider ones come later.
    """
    wide, narrow = (f(n for layer in _linears(model) for n in layer.weight.shape)
                    for f in (max, min))
    x, y, w = (torch.randn(shape, generator=torch.Generator().manual_seed(0))
               for shape in ((8, wide), (8, narrow), (narrow, wide)))
    before, found = torch.get_num_threads(), []
    for threads in range(1, most + 1):
        torch.set_num_threads(threads)
        found.append(torch.cat([product.flatten() for product in (
            x @ w.T, y @ w, y.T @ x, y @ w[:, :narrow], y.T @ y)]))
        if not torch.equal(found[0], found[-1]):
            found.pop()
            break
    torch.set_num_threads(before)
    return len(found)


def _tiny(seed):
    """0.3M parameters that have seen sums of two digits, half of them wrong: such a model knows
    what an answer looks like, and samples the right one in about half of all cases."""
    vocabulary = ["<pad>", "<bos>", "<eos>", "\n", *map(chr, range(32, 127))]
    characters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(vocabulary)}, "<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>",
                                        bos_token="<bos>", eos_token="<eos>", unk_token="<pad>")
    config = LlamaConfig(vocab_size=len(vocabulary), hidden_size=128, intermediate_size=256,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         tie_word_embeddings=True, initializer_range=0.08, pad_token_id=0,
                         bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = place(attach(LlamaForCausalLM(config).train()), ["cpu"])
    rng = np.random.Generator(np.random.Philox(key=seed))
    prompts = {(a, b): tokenizer(f"{a}+{b}=").input_ids for a in range(10) for b in range(10)}
    answers = [tokenizer(f"{n}<eos>").input_ids for n in range(19)]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    for step in range(TINY_STEPS):
        pairs = rng.permutation(list(prompts))[:25]  # each with 4 answers
        numbers = np.where(rng.random((25, 4)) < 0.5, pairs.sum(1, keepdims=True),
                           rng.integers(0, 19, (25, 4)))
        packed = pack([prompts[a, b] for a, b in pairs],
                      [[answers[n] for n in row] for row in numbers])
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, step / 50) * (1 - step / TINY_STEPS)
        (-token_logprobs(model, packed).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def token_logprobs(model, packed: Packed, temperature: float = 1.0, sums: dict | None = None,
                   cuts: list | None = None) -> Tensor:
    """log p(token | what it may attend to) of every response token, (A,), differentiable.
    The head sees only the places that predict a response token, in chunks that the backward pass
    computes again. Its product follows autocast; the log-softmax is float32, float64 for such.
    `sums["entropy_sum"]` becomes the sum of the entropies of the A distributions, in nats.
    With `cuts` the graph is cut between the stages, so that their backward passes can run one by
    one: it gets (what a stage puts out, what the next takes in) for every cut."""
    embedding = model.get_input_embeddings()
    hidden = embedding(upload(packed.input_ids, embedding.weight.device))
    for number, (where, stage) in enumerate(stages(model)):
        here, given = packed.to(where), hidden.to(where, non_blocking=True)
        if number and cuts is not None:
            given = given.detach().requires_grad_()
            cuts.append((hidden, given))
        hidden = stage(inputs_embeds=given, position_ids=here.position_ids, packed=here,
                       use_cache=False).last_hidden_state
    # index_select, not hidden[...]: a prompt's last place occurs K times, and only the backward
    # pass of index_select adds those gradients in a fixed order.
    # Filled up to a multiple of 8 rows: below one the bits of the products depend on threads.
    tokens = len(here.targets)
    filling = (0, -tokens % 8)
    logprobs, entropy = _HeadLogprobs.apply(
        hidden[0].index_select(0, pad(here.predictors, filling)),
        model.get_output_embeddings().weight, pad(here.targets, filling), temperature)
    if sums is not None:
        sums["entropy_sum"] = entropy[:tokens].sum()
    return logprobs[:tokens]


def stages(model) -> list[tuple]:
    """(device, base model with a part of the layers) of a model; one, unless `place` cut it."""
    return getattr(model, "stages", None) or [(model.device, model.base_model)]


def _up(n, step):
    return -(-int(n) // step) * step


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _chunks(hidden, head):
    rows = max(8, HEAD_CHUNK // len(head) // 8 * 8)
    return [slice(i, i + rows) for i in range(0, len(hidden), rows)]


class _HeadLogprobs(torch.autograd.Function):
    """Head and log-softmax of (A, D) hidden states; backward computes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        """(A, D), (V, D), (A,) -> log-probs (A,) and, without gradient, entropies (A,) in nats."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        low, head = hidden.to(dtype), weight.to(dtype)
        logprobs, normaliser, entropy = (_wide(low.new_empty(len(low))) for _ in range(3))
        with torch.autocast(kind, enabled=False):
            for rows in _chunks(low, head):
                logits = _wide(low[rows] @ head.T).div_(temperature)
                largest = logits.amax(-1, keepdim=True)
                p = (logits - largest).exp_()
                total = p.sum(-1)
                normaliser[rows] = largest[:, 0] + total.log()
                logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - normaliser[rows]
                entropy[rows] = normaliser[rows] - p.mul_(logits).sum(-1) / total
                del logits, p  # or they would still be there when the next ones are made
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.temperature, ctx.dtype = temperature, dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        """Gradients of hidden states and of the weight."""
        hidden, weight, targets, normaliser = ctx.saved_tensors
        low, head = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden)
        # From the second micro-batch on straight into the gradient: one head-sized tensor less.
        total = torch.zeros_like(weight) if weight.grad is None else weight.grad
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(low, head):
                # d logprob / d logits = (one-hot of the target) - softmax
                d = _wide(low[rows] @ head.T).div_(ctx.temperature)
                d.sub_(normaliser[rows, None]).exp_().mul_(-grad[rows, None])
                d.scatter_add_(1, targets[rows, None], grad[rows, None])
                d = d.div_(ctx.temperature).to(ctx.dtype)
                grad_hidden[rows] = (d @ head).to(hidden.dtype)
                if ctx.dtype == weight.dtype:
                    total.addmm_(d.T, low[rows])
                else:
                    total += d.T @ low[rows]
                del d
        # Of the weight nothing more, where its gradient was added to above.
        return grad_hidden, None if total is weight.grad else total, None, None


class TriModel:
    """Policy, old policy and reference: one architecture, one tokenizer, one placement. The policy
    alone has gradients; `old` is the inference copy; `reference` is None when beta is 0."""

    def __init__(self, policy, old=None, reference=None, *, temperature: float = 1.0,
                 dtype: torch.dtype = torch.float32):
        self.policy, self.old, self.reference = policy, old, reference
        self.temperature, self.dtype = temperature, dtype
        self.device = stages(policy)[-1][0]  # of the last stage: head, log-probs and loss

    def logprobs(self, packed: Packed, sums: dict | None = None, cuts: list | None = None, *,
                 forward_old: bool = False) -> tuple:
        """(policy, old, reference or None) log-probs (A,) of one micro-batch. Until the first step
        after a weight copy the policy is the old policy, so `old` is its value, detached;
        `forward_old` runs the old weights instead, as the paper does. `sums`: of the policy."""
        policy = self.score(self.policy, packed, sums, cuts)
        with torch.no_grad():  # not inference_mode: its outputs cannot be saved for backward
            old = self.score(self.old, packed) if forward_old else policy.detach()
            reference = None if self.reference is None else self.score(self.reference, packed)
        return policy, old, reference

    def score(self, model, packed: Packed, sums: dict | None = None,
              cuts: list | None = None) -> Tensor:
        """Log-probs (A,) of one of the three models, at the run's temperature and precision."""
        with autocast(self.device, self.dtype):
            return token_logprobs(model, packed, self.temperature, sums, cuts).to(self.device)


def autocast(device: torch.device, dtype: torch.dtype):
    """bfloat16 matrix products over float32 parameters; nothing for float32 and float64."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


class InferenceCopy:
    """θ_t with its key/value slots: continuous batching over `rows` responses at a time.
    `submit` queues K responses to a prompt. `launch` prefills the earliest prompts if rows are
    free, else it decodes one token a row; `finish` reads the sampled tokens, a step's one read, and
    returns the responses that ended. In between, one thread launches other copies. A response is
    waiting, staged once its prompt is prefilled, in a row, returned; after `finish` one is staged
    only while every row is taken. Rows are multiples of 8: else the bits of a product depend on
    threads. On a CPU the copy may store the matrices of its model in another order; on an
    accelerator it has a stream of its own: between it and the trainer's go host values, and weights
    between periods."""

    def __init__(self, model, stop: Sequence[int], *, rows: int, longest_prompt: int,
                 max_new_tokens: int, temperature: float = 1.0,
                 dtype: torch.dtype = torch.float32):
        config, rows = model.config, _up(rows, 8)
        self.model, self.device, self.dtype = model, model.device, dtype
        self.stop, self.temperature, self.limit = np.array(stop), temperature, max_new_tokens
        self.longest_prompt, self.version = longest_prompt, 0
        cpu = torch.backends.cpu.get_cpu_capability() if self.device.type == "cpu" else ""
        for module in _linears(model) if (cpu, dtype) == ("AVX512", torch.float32) else ():
            # By columns: a sixth less time for the products of a step; with AVX2 a quarter more
            module.weight.data = module.weight.data.T.contiguous().T
        self.slots = Slots(config.num_hidden_layers, rows, config.num_key_value_heads,
                           _up(longest_prompt, WIDTH_STEP), _up(max_new_tokens, WIDTH_STEP),
                           model.base_model.layers[0].self_attn.head_dim,
                           dtype=dtype, device=self.device)
        # What a row holds, on the host: (ticket, sample); where its prompt's keys and values are,
        # the prompt's tokens, tokens sampled; these, and what decides them. Rows 0 .. live - 1.
        self.live, self.request = 0, [None] * rows
        self.slot, self.length, self.count = (np.zeros(rows, dtype=np.int64) for _ in range(3))
        self.ids = np.zeros((rows, max_new_tokens), dtype=np.int64)
        self.logprobs, self.uniforms = np.zeros((2, rows, max_new_tokens), dtype=np.float32)
        self.waiting: deque = deque()  # (ticket, prompt ids, uniforms), not yet prefilled
        self.staged: deque = deque()   # ((ticket, sample), prompt slot, prompt length, uniforms,
                                       # first token, its log-prob): prefilled, without a row yet
        self.stream = contextlib.nullcontext()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # what the default stream made is there
            self.stream = torch.Stream(self.device)

    def submit(self, ticket, prompt_ids: Sequence[int], uniforms: np.ndarray) -> None:
        """Queue K responses to a prompt; uniforms, (K, max_new_tokens) float32 in [0, 1), decide
        their tokens. Raises ValueError for a prompt that does not fit the slots."""
        if not 0 < len(prompt_ids) <= self.longest_prompt:
            raise ValueError(f"{len(prompt_ids)} prompt tokens, not 1 to {self.longest_prompt}")
        self.waiting.append((ticket, list(prompt_ids), uniforms))

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.staged or self.live)

    @property
    def admits(self) -> bool:
        return bool(self.waiting) and self.live < len(self.request)

    @property
    def tokens_waiting(self) -> int:
        return sum(len(prompt) + uniforms.size for _, prompt, uniforms in list(self.waiting))

    def launch(self) -> None:
        """Start a step on the device."""
        with self.stream, torch.inference_mode(), autocast(self.device, self.dtype):
            free = len(self.request) - self.live
            self.sampled, self.take = self.prefill(free) if self.admits else self.decode()

    def finish(self) -> list[tuple]:
        """End it: [(ticket, sample, ids, logprobs, finished)] for every response that ended."""
        with self.stream:
            self.take(self.sampled.cpu().numpy().T)
            ended = self._ended()
            while free := min(len(self.staged), len(self.request) - self.live):
                for row in range(self.live, self.live + free):
                    (self.request[row], self.slot[row], self.length[row], self.uniforms[row],
                     self.ids[row, 0], self.logprobs[row, 0]) = self.staged.popleft()
                    self.count[row] = 1
                self.live += free
                ended += self._ended()  # a first token may be a stop token
        return ended

    def prefill(self, rows: int) -> tuple[Tensor, Callable]:
        """Keys and values of the first waiting prompts, as many as fill `rows`, in one packed pass:
        once a prompt, however many responses it gets. Samples the first token of each. Returns
        what was sampled, still on the device, and what to do with it on the host."""
        chosen, responses, tokens = [], 0, 0
        while self.waiting and responses < rows and tokens < PREFILL_TOKENS:
            chosen.append(self.waiting.popleft())
            tokens, responses = tokens + len(chosen[-1][1]), responses + len(chosen[-1][2])
        # Prompt slots that no row reads: nothing is staged, and there are as many slots as rows.
        free = np.setdiff1d(np.arange(len(self.request)), self.slot[:self.live])[:len(chosen)]
        packed = pack([prompt for _, prompt, _ in chosen], [[]] * len(chosen), multiple=8)
        slot_of_token = torch.from_numpy(free)[packed.group_of_place[:tokens]]
        packed = packed.to(self.device)
        self.slots.aim(self.slots.prompts, upload(slot_of_token, self.device),
                       packed.position_ids[0, :tokens])
        hidden = self.model.base_model(input_ids=packed.input_ids, packed=packed, slots=self.slots,
                                       position_ids=packed.position_ids,
                                       use_cache=False).last_hidden_state[0]
        ends = packed.prompt_lengths.cumsum(0) - 1
        last = hidden.index_select(0, pad(ends, (0, -len(ends) % 8)))
        logits = _wide(self.model.get_output_embeddings()(last))
        of_prompt = torch.tensor([i for i, (*_, uniforms) in enumerate(chosen) for _ in uniforms])
        sampled = self._sample(logits.index_select(0, upload(of_prompt, self.device)),
                               np.concatenate([uniforms[:, 0] for *_, uniforms in chosen]))

        def take(sampled):
            first = zip(*sampled)
            for (ticket, prompt, uniforms), slot in zip(chosen, free):
                self.staged.extend(((ticket, sample), slot, len(prompt), row, *next(first))
                                   for sample, row in enumerate(uniforms))
        return sampled, take

    def decode(self) -> tuple[Tensor, Callable]:
        """One token for every row in flight; returns as `prefill` does."""
        rows = np.arange(self.live)
        slot, length, count = (x[rows] for x in (self.slot, self.length, self.count))
        # The rows of a prompt become lanes of its slot: how many rows before this one share it?
        lane = np.tril(slot[:, None] == slot, -1).sum(1)
        lanes = np.zeros((_up(slot.max() + 1, 4), _up(lane.max() + 1, 4)), dtype=np.int64)
        lanes[slot, lane] = rows
        # The newest token is number count - 1: this step stores its key and value at that place.
        widths = _up(length.max(), WIDTH_STEP), _up(count.max(), WIDTH_STEP)
        state = np.stack([self.ids[rows, count - 1], length, count - 1, slot, lane])
        state = np.pad(state, ((0, 0), (0, -len(rows) % 8)))
        (token, length, place, slot, lane), lanes = (
            upload(torch.from_numpy(x), self.device) for x in (state, lanes))
        self.slots.aim_decode(length, place, slot, lane, lanes, widths)
        hidden = self.model.base_model(input_ids=token[:, None], slots=self.slots, use_cache=False,
                                       position_ids=(length + place)[:, None]).last_hidden_state
        logits = _wide(self.model.get_output_embeddings()(hidden[:, 0]))

        def take(sampled):
            self.ids[rows, count], self.logprobs[rows, count] = sampled
            self.count[rows] += 1
        return self._sample(logits, self.uniforms[rows, count]), take

    def _sample(self, logits: Tensor, uniforms: np.ndarray) -> Tensor:
        """Tokens and their log-probs, (n, 2), for n uniforms and as many of the logits (rows, V).
        Temperature 0 takes the likeliest token, else the first whose cumulative probability is
        above uniform * total: below the total in float32, too, so there is one."""
        if self.temperature == 0:
            p, token = logits.softmax(-1), logits.argmax(-1, keepdim=True)
        else:
            p = (logits if self.temperature == 1 else logits / self.temperature).softmax(-1)
            up_to = p.cumsum(-1)
            given = torch.from_numpy(np.pad(uniforms, (0, len(p) - len(uniforms))))
            bound = upload(given, p.device)[:, None] * up_to[:, -1:]
            token = torch.searchsorted(up_to, bound, right=True)
        # Ids are exact in float32 up to 2**24, and one tensor is one read.
        return torch.cat([token.to(p.dtype), p.gather(1, token).log()], 1)[:len(uniforms)]

    def _stopped(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows end with a stop token."""
        return np.isin(self.ids[rows, self.count[rows] - 1], self.stop)

    def _ended(self) -> list[tuple]:
        """Free the rows whose newest token is a stop token, or their last; the last row in flight
        moves into each, so that a step works on the first ones."""
        rows, ended = np.arange(self.live), []
        stopped = self._stopped(rows)
        for row in np.flatnonzero(stopped | (self.count[rows] == self.limit))[::-1]:
            n = self.count[row]
            ended.append((*self.request[row], self.ids[row, :n].tolist(),
                          self.logprobs[row, :n].tolist(), bool(stopped[row])))
            self.live -= 1
            for state in (self.request, self.slot, self.length, self.count, self.ids,
                          self.logprobs, self.uniforms):
                state[row] = state[self.live]
            for stored in self.slots.responses:
                stored[:, row] = stored[:, self.live]
        return ended[::-1]


@torch.no_grad()
def copy_weights(src, dst: InferenceCopy, version: int) -> None:
    """Make `dst` θ_version: copy every parameter and buffer of the policy `src`, cast to the copy's
    dtypes, in place, so tied weights stay tied. Raises RuntimeError while a request is in flight:
    its tokens would come from two policies. Without one, no cached key or value is read again."""
    if not dst.idle:
        raise RuntimeError("weights were copied while requests were in flight")
    sources = dict([*src.named_parameters(), *src.named_buffers()])
    for name, target in [*dst.model.named_parameters(), *dst.model.named_buffers()]:
        target.copy_(sources[name])
    dst.version = version
