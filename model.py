"""The models: loading, token log-probs, the trainer's tri-model, the generator's inference copy.

Where this departs from a trainer beside an inference engine:
1. One process holds three sets of weights: the policy, the reference, and the inference copy, which
   *is* the old policy θ_t: between two weight copies nobody writes to it.
2. Until the first optimizer step the policy equals the old policy, so `old` is `policy.detach()`:
   the ratio is exactly 1 in every dtype, and costs no forward pass.
3. Only places that predict a response token meet the head, in chunks of logits: never (A, V).
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
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate.hooks import remove_hook_from_submodules
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig,
                          LlamaForCausalLM, PreTrainedTokenizerFast)

from attention import Packed, Slots, attach, pack, product_dtype, refuse, round_up, upload

HEAD_CHUNK = 2**24       # logits computed at once, in elements: 64 MiB of float32
PREFILL_TOKENS = 4096    # a prefill takes no further prompt from here on
WIDTH_STEP = 16          # decoding attends over a multiple of this many places


def token_logprobs(model, packed: Packed, temperature: float = 1.0, sums: dict | None = None,
                   cuts: list | None = None) -> Tensor:
    """log p(token | what it may attend to) of every response token, (A,), differentiable.
    The head sees only the places that predict a response token, in chunks that the backward pass
    computes again. Its product follows autocast; the log-softmax is float32, float64 for such.
    `sums["entropy_sum"]` becomes the sum of the entropies of the A distributions, in nats.
    With `cuts` the graph is cut between the stages, so that their backward passes can run one by
    one (1F1B, see `Trainer`): it gets (what leaves a stage, what enters the next) for every cut."""
    embedding = model.get_input_embeddings()
    hidden = embedding(upload(packed.input_ids, embedding.weight.device))
    for number, (where, stage) in enumerate(stages(model)):
        here, entering = packed.to(where), hidden.to(where, non_blocking=True)
        if number and cuts is not None:
            entering = entering.detach().requires_grad_()
            cuts.append((hidden, entering))
        hidden = stage(inputs_embeds=entering, position_ids=here.position_ids, packed=here,
                       use_cache=False).last_hidden_state
    # index_select, not hidden[...]: a prompt's last place occurs K times, and only the backward
    # pass of index_select adds those gradients in a fixed order. Filled up to a multiple of 8:
    # below one the bits of the products depend on threads.
    tokens = len(here.targets)
    filling = (0, -tokens % 8)
    logprobs, entropy = _HeadLogprobs.apply(
        hidden[0].index_select(0, pad(here.predictors, filling)),
        model.get_output_embeddings().weight, pad(here.targets, filling), temperature)
    if sums is not None:
        sums["entropy_sum"] = entropy[:tokens].sum()
    return logprobs[:tokens]


def stages(model) -> list[tuple]:
    """(device, base model with a part of the layers) of a model; one, unless it was cut. Only the
    last one's norm is more than the identity."""
    return getattr(model, "stages", None) or [(model.device, model.base_model)]


class _HeadLogprobs(torch.autograd.Function):
    """Log-probs of targets (A,), from hidden states (A, D) and the head's weight (V, D):

        logits = (hidden @ weight.T).float() / temperature
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    and, without gradient, the entropies (A,) of the softmax in nats. Autograd would keep the (A, V)
    logits of these two lines for the backward pass; here they are made in chunks, and once more by
    `backward`, which adds to the gradient of the weight where that stands."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        """Log-probs and entropies; kept for `backward`: the logarithms of the softmax's sums."""
        dtype = product_dtype(hidden)
        low, head = hidden.to(dtype), weight.to(dtype)
        logprobs, normaliser, entropy = (_wide(low.new_empty(len(low))) for _ in range(3))
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(low, head):
                logits = _wide(low[chunk] @ head.T).div_(temperature)
                largest = logits.amax(-1, keepdim=True)
                p = (logits - largest).exp_()
                total = p.sum(-1)
                normaliser[chunk] = largest[:, 0] + total.log()
                logprobs[chunk] = logits.gather(1, targets[chunk, None])[:, 0] - normaliser[chunk]
                entropy[chunk] = normaliser[chunk] - p.mul_(logits).sum(-1) / total
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
        # Where there is a gradient, in `Trainer` always, straight into it: one such tensor less.
        in_place = weight.grad is not None
        grad_weight = weight.grad if in_place else torch.zeros_like(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(low, head):
                # d logprob / d logits = (one-hot of the target) - softmax
                d = _wide(low[chunk] @ head.T).div_(ctx.temperature)
                d.sub_(normaliser[chunk, None]).exp_().mul_(-grad[chunk, None])
                d.scatter_add_(1, targets[chunk, None], grad[chunk, None])
                d = d.div_(ctx.temperature).to(ctx.dtype)
                grad_hidden[chunk] = (d @ head).to(hidden.dtype)
                if ctx.dtype == weight.dtype:
                    grad_weight.addmm_(d.T, low[chunk])
                else:
                    grad_weight += d.T @ low[chunk]
                del d
        # What was added in place must not be added by autograd, too.
        return grad_hidden, None if in_place else grad_weight, None, None


class TriModel:
    """Policy, old policy and reference: one architecture, one tokenizer, one layout over devices.
    The policy alone has gradients; `reference` is None when beta is 0.
    Training never runs `old`: its log-probs are the policy's own, see `logprobs`. Who wants them
    computed, as the paper does it, gives weights here and `forward_old=True` there; a test holds
    both ways against each other. The old weights are the inference copy's: no fourth set."""

    def __init__(self, policy, old=None, reference=None, *, temperature: float = 1.0,
                 dtype: torch.dtype = torch.float32):
        self.policy, self.old, self.reference = policy, old, reference
        self.temperature, self.dtype = temperature, dtype
        self.device = stages(policy)[-1][0]  # of the last stage: head, log-probs and loss

    def logprobs(self, packed: Packed, sums: dict | None = None, cuts: list | None = None, *,
                 forward_old: bool = False) -> tuple:
        """(policy, old, reference or None) log-probs (A,) of one micro-batch. Until the first step
        after a weight copy the policy is the old policy, so `old` is its value, detached. `sums`
        and `cuts`, as `token_logprobs` has them, are the policy's."""
        policy = self.score(self.policy, packed, sums, cuts)
        old, reference = policy.detach(), None
        with torch.no_grad():  # not inference_mode: its outputs cannot be saved for backward
            if forward_old:
                old = self.score(self.old, packed)
            if self.reference is not None:
                reference = self.score(self.reference, packed)
        return policy, old, reference

    def score(self, model, packed: Packed, sums: dict | None = None,
              cuts: list | None = None) -> Tensor:
        """Log-probs (A,) of one of the three models, at the run's temperature and precision."""
        with autocast(self.device, self.dtype):
            return token_logprobs(model, packed, self.temperature, sums, cuts).to(self.device)


@dataclass(slots=True)
class Row:
    """A response in flight, on the host: staged, then one row of every decode step."""
    ticket: object             # whose it is, given to `submit`, and which of the K it is
    sample: int
    slot: int                  # where the keys and values of its prompt are
    prompt_length: int
    uniforms: np.ndarray       # (max_new_tokens,) they decide its tokens
    ids: list = field(default_factory=list)       # the tokens sampled so far
    logprobs: list = field(default_factory=list)  # and theirs


class InferenceCopy:
    """θ_t with its key/value slots: continuous batching over `rows` responses at a time.

    `submit` queues K responses to a prompt. `launch` starts a step on the device: it prefills the
    earliest prompts if rows are free, else it decodes one token a row. `finish` reads what was
    sampled, a step's one read, and returns the responses that ended; in between, one thread
    launches other copies. A response is
        waiting    from `submit` on: its prompt is not computed yet
        staged     from prefill on: its prompt is in a slot, it has a first token, but no row
        in a row   one token a decode step
        returned   after a stop token, or `max_new_tokens`
    What holds:
        After `finish` a response is staged only while every row is taken.
        Keys and values of rows[i] are in slots.responses[:, i], those of its prompt in
        slots.prompts[:, rows[i].slot]; there are as many prompt slots as rows.
        A step works on a multiple of 8 rows: else the bits of a product depend on threads.
    `temperature` is one for all requests, to be set while idle; 0 takes the likeliest token. On an
    accelerator the copy has its own stream: to the trainer's go host values alone, from it weights.
    """

    def __init__(self, model, stop: Sequence[int], *, rows: int, longest_prompt: int,
                 max_new_tokens: int, temperature: float = 1.0,
                 dtype: torch.dtype = torch.float32):
        config = model.config
        self.model, self.device, self.dtype = model, model.device, dtype
        self.stop, self.temperature = set(stop), temperature
        self.longest_prompt, self.max_new_tokens = longest_prompt, max_new_tokens
        self.max_rows = round_up(rows, 8)
        self.version, self.copying = 0, False  # both set by `copy_weights`
        _order_matrices(model, dtype)
        self.slots = Slots(config.num_hidden_layers, self.max_rows, config.num_key_value_heads,
                           round_up(longest_prompt, WIDTH_STEP),
                           round_up(max_new_tokens, WIDTH_STEP),
                           model.base_model.layers[0].self_attn.head_dim,
                           dtype=dtype, device=self.device)
        self.waiting: deque = deque()  # (ticket, prompt ids, uniforms)
        self.staged: deque[Row] = deque()
        self.rows: list[Row] = []
        self.stream = _stream(self.device)

    def submit(self, ticket, prompt_ids: Sequence[int], uniforms: np.ndarray) -> None:
        """Queue K responses to a prompt; uniforms, (K, max_new_tokens) float32 in [0, 1), decide
        their tokens. Raises ValueError for a prompt that does not fit the slots, and RuntimeError
        while weights are copied: its tokens would come from two policies."""
        if self.copying:
            raise RuntimeError("a request was submitted while weights were copied")
        if not 0 < len(prompt_ids) <= self.longest_prompt:
            raise ValueError(f"{len(prompt_ids)} prompt tokens, not 1 to {self.longest_prompt}")
        self.waiting.append((ticket, list(prompt_ids), uniforms))

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.staged or self.rows)

    @property
    def admits(self) -> bool:  # the next step is a prefill
        return bool(self.waiting) and len(self.rows) < self.max_rows

    @property
    def tokens_waiting(self) -> int:
        return sum(len(prompt) + uniforms.size for _, prompt, uniforms in list(self.waiting))

    def launch(self) -> None:
        """Start a step on the device: a token for each of the rows `stepping`."""
        with self.stream, torch.inference_mode(), autocast(self.device, self.dtype):
            if self.admits:
                self.stepping, self.sampled = self.prefill()
            else:
                self.stepping, self.sampled = self.rows, self.decode()

    def finish(self) -> list[tuple]:
        """End it: [(ticket, sample, ids, logprobs, finished)] for every response that ended."""
        with self.stream:
            for row, (token, logprob) in zip(self.stepping, self.sampled.cpu().tolist()):
                row.ids.append(int(token))
                row.logprobs.append(logprob)
            ended = self._ended()
            while starting := min(len(self.staged), self.max_rows - len(self.rows)):
                for _ in range(starting):
                    self.rows.append(self.staged.popleft())
                ended += self._ended()  # a first token may be a stop token
        return ended

    def prefill(self) -> tuple[list[Row], Tensor]:
        """Keys and values of the first waiting prompts, as many as fill the free rows, in one
        packed pass: once a prompt, however many responses it gets. Returns these responses, and
        their first tokens with log-probs, (n, 2), on the device."""
        # There is a free slot for every prompt: nothing is staged now, so rows alone hold slots,
        # at most one each, and a prompt that is taken has one of the free rows at least.
        held = {row.slot for row in self.rows}
        free = [slot for slot in range(self.max_rows) if slot not in held]
        free_rows = self.max_rows - len(self.rows)
        prompts, started, prompt_of, slot_of_token = [], [], [], []
        while (self.waiting and len(started) < free_rows
               and len(slot_of_token) < PREFILL_TOKENS):
            ticket, prompt, uniforms_of_all = self.waiting.popleft()
            slot = free[len(prompts)]
            slot_of_token += [slot] * len(prompt)
            for sample, uniforms in enumerate(uniforms_of_all):
                started.append(Row(ticket, sample, slot, len(prompt), uniforms))
                prompt_of.append(len(prompts))
            prompts.append(prompt)
        self.staged.extend(started)
        packed = pack(prompts, [[]] * len(prompts), multiple=8)
        packed = packed.to(self.device)
        self.slots.aim(self.slots.prompts, upload(torch.tensor(slot_of_token), self.device),
                       packed.position_ids[0, :len(slot_of_token)])
        hidden = self.model.base_model(input_ids=packed.input_ids, packed=packed, slots=self.slots,
                                       position_ids=packed.position_ids,
                                       use_cache=False).last_hidden_state[0]  # (T, D)
        ends = packed.prompt_lengths.cumsum(0) - 1  # the places that predict first tokens
        last = hidden.index_select(0, pad(ends, (0, -len(ends) % 8)))
        logits = _wide(self.model.get_output_embeddings()(last))  # (prompts, V), then (n, V)
        logits = logits.index_select(0, upload(torch.tensor(prompt_of), self.device))
        return started, self._sample(logits, started)

    def decode(self) -> Tensor:
        """A token with its log-prob for every row, (n, 2), on the device."""
        # The rows of a prompt are lanes of its slot, which is read once for all of them:
        #     row   0 1 2 3 4                  lane 0 1 2 3
        #     slot  1 0 1 1 0    lanes[slot 0] =    1 4 . .    numbers of rows; `.` is 0, filling
        #     lane  0 0 1 2 1    lanes[slot 1] =    0 2 3 .    whose result nobody reads
        tokens, lengths, places, slots, lane_of = [], [], [], [], []
        seen = [0] * self.max_rows  # rows of each slot so far
        for row in self.rows:
            tokens.append(row.ids[-1])  # this step stores its key and value at its place
            lengths.append(row.prompt_length)
            places.append(len(row.ids) - 1)
            slots.append(row.slot)
            lane_of.append(seen[row.slot])
            seen[row.slot] += 1
        lanes = np.zeros((round_up(max(slots) + 1, 4), round_up(max(seen), 4)), dtype=np.int64)
        lanes[slots, lane_of] = np.arange(len(slots))
        widths = round_up(max(lengths), WIDTH_STEP), round_up(max(places) + 1, WIDTH_STEP)
        state = np.array([tokens, lengths, places, slots, lane_of])  # (5, n), then a multiple of 8
        state = torch.from_numpy(np.pad(state, ((0, 0), (0, -len(slots) % 8))))
        token, length, place, slot, lane = upload(state, self.device)
        lanes = upload(torch.from_numpy(lanes), self.device)
        self.slots.aim_decode(length, place, slot, lane, lanes, widths)
        hidden = self.model.base_model(input_ids=token[:, None], slots=self.slots, use_cache=False,
                                       position_ids=(length + place)[:, None]).last_hidden_state
        logits = _wide(self.model.get_output_embeddings()(hidden[:, 0]))
        return self._sample(logits, self.rows)

    def _sample(self, logits: Tensor, rows: list[Row]) -> Tensor:
        """The next tokens of n rows and their log-probs, (n, 2), from the first n logits (.., V).
        Temperature 0 takes the likeliest token, else the first whose cumulative probability is
        above uniform * total: below the total in float32, too, so there is one."""
        if self.temperature == 0:
            p, token = logits.softmax(-1), logits.argmax(-1, keepdim=True)
        else:
            if self.temperature != 1:
                logits = logits / self.temperature
            p = logits.softmax(-1)
            up_to = p.cumsum(-1)
            uniforms = np.zeros((len(p), 1), dtype=np.float32)
            for number, row in enumerate(rows):
                uniforms[number, 0] = row.uniforms[len(row.ids)]
            bound = upload(torch.from_numpy(uniforms), p.device) * up_to[:, -1:]
            token = torch.searchsorted(up_to, bound, right=True)
        # Ids are exact in float32 up to 2**24, and one tensor is one read.
        return torch.cat([token.to(p.dtype), p.gather(1, token).log()], 1)[:len(rows)]

    def _stopped(self, row: Row) -> bool:
        return row.ids[-1] in self.stop

    def _ended(self) -> list[tuple]:
        """Take out the rows whose newest token is a stop token, or their last. The last row moves
        into each gap, so that a step works on the first ones. From the last row on: so the row that
        moves is one that has been looked at, and goes on."""
        ended = []
        for number in reversed(range(len(self.rows))):
            row = self.rows[number]
            finished = self._stopped(row)
            if not finished and len(row.ids) < self.max_new_tokens:
                continue
            ended.append((row.ticket, row.sample, row.ids, row.logprobs, finished))
            last = self.rows.pop()
            if last is not row:
                self.rows[number] = last
                for stored in self.slots.responses:
                    stored[:, number] = stored[:, len(self.rows)]
        return ended[::-1]


@torch.no_grad()
def copy_weights(src, dst: InferenceCopy, version: int) -> None:
    """Make `dst` θ_version: copy every parameter and buffer of the policy `src`, cast to the copy's
    dtypes, in place, so tied weights stay tied. Raises RuntimeError while a request is in flight:
    its tokens would come from two policies. Without one, no cached key or value is read again."""
    dst.copying = True  # before the look at `idle`: what is submitted after it is refused
    try:
        if not dst.idle:
            raise RuntimeError("weights were copied while requests were in flight")
        sources = dict([*src.named_parameters(), *src.named_buffers()])
        for name, target in [*dst.model.named_parameters(), *dst.model.named_buffers()]:
            target.copy_(sources[name])
        dst.version = version
    finally:
        dst.copying = False


# ---- The method ends here. What follows: settings of the process, loading, devices and stages,
# the built-in task and model, the plan.

# Read before the first product: else, on some CPUs, MKL's bits depend on the number of threads.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
with contextlib.suppress(AttributeError, TypeError):  # other C libraries have no mallopt
    # glibc returns large freed blocks to the kernel, and the next micro-batch pays page faults for
    # them. M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD; now, for a thread keeps its first arena.
    for option, value in (-8, 1), (-4, 0), (-1, 2**31 - 1):
        ctypes.CDLL(None).mallopt(option, value)


def _chunks(hidden, head):
    size = max(8, HEAD_CHUNK // len(head) // 8 * 8)
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def autocast(device: torch.device, dtype: torch.dtype):
    """bfloat16 matrix products over float32 parameters; nothing for float32 and float64."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def load(name: str, device="cpu", dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple:
    """A causal language model in train mode with shared-prompt attention, and its tokenizer.
    `name` is `tiny` (made here, from `seed`), a folder or a hub id; `device` is one, or a list of
    them, over which the layers are laid out as they are read. Dropout is off: with it, the trainer
    would score tokens under another model than sampled them. Raises ValueError that says what is
    wrong with name, architecture or files."""
    devices = device if isinstance(device, list) else [device]
    if name == "tiny":
        model, tokenizer = _tiny(seed)
        return cut_into_stages(model.to(dtype), devices), tokenizer
    if not Path(name).is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ValueError(f"no model {name}: it must be tiny, a folder or a hub id (owner/name)")
    try:
        config = AutoConfig.from_pretrained(name)
        refuse(config)
        config.attention_dropout = 0.0
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, report = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, use_safetensors=True,
            device_map=layout(config, devices), output_loading_info=True)
    except Exception as error:  # each library has its own; the first line says what is missing
        raise ValueError(f"cannot load the model {name}: {_first_line(error)}") from None
    if absent := sorted(report["missing_keys"]):  # transformers would train on with random values
        raise ValueError(f"the model {name} has no weights for {', '.join(absent[:3])}")
    remove_hook_from_submodules(model)  # they would copy the logits back to the first device
    return cut_into_stages(attach(model.train()), devices), tokenizer


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


def _order_matrices(model, dtype):
    """Store the weights of a copy by columns where that is faster: with AVX-512 a decode step's
    products take a sixth less time, with AVX2 they would take a quarter more."""
    if (model.device.type == "cpu" and dtype == torch.float32
            and torch.backends.cpu.get_cpu_capability() == "AVX512"):
        for module in _linears(model):
            module.weight.data = module.weight.data.T.contiguous().T


def _stream(device):
    """A stream of its own for a copy that has just been made; a CPU has none."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    torch.accelerator.synchronize(device)  # what the default stream made is there
    return torch.Stream(device)


def _linears(model):
    """All `Linear` modules but a head tied to the embedding."""
    embedding = model.get_input_embeddings().weight
    return [module for module in model.modules()
            if isinstance(module, torch.nn.Linear) and module.weight is not embedding]


def find_devices(names: str) -> list[torch.device]:
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


def layout(config, devices: Sequence) -> dict:
    """Module name -> device, for stages laid out over `devices`. The one rule for an embedding that
    is tied to the head: it stays with the head, on the last device."""
    edges = stage_edges(config.num_hidden_layers, len(devices))
    found = {}
    for stage, where in enumerate(devices):
        for layer in range(edges[stage], edges[stage + 1]):
            found[f"model.layers.{layer}"] = where
    return found | {"model.embed_tokens": devices[-1 if config.tie_word_embeddings else 0],
                    "model.rotary_emb": devices[0], "model.norm": devices[-1],
                    "lm_head": devices[-1]}


def cut_into_stages(model, devices: Sequence):
    """Cut a model into stages, one a device: each is the base model with a part of the layers, and
    the last alone has the norm. Returns the model. The parameters stay the model's own."""
    for name, where in layout(model.config, devices).items():
        model.get_submodule(name).to(where)
    model.tie_weights()  # on its way to an NPU a parameter becomes a new one
    base, model.stages = model.base_model, []
    edges = stage_edges(len(base.layers), len(devices))
    for number, where in enumerate(map(torch.device, devices)):
        # A copy, not a subclass: a stage runs the forward pass of whatever class the base model
        # is, over fewer layers.
        stage = copy.copy(base)
        stage._modules = dict(base._modules)  # which a shallow copy shares
        stage.layers = base.layers[edges[number]:edges[number + 1]]
        stage.rotary_emb = copy.deepcopy(base.rotary_emb).to(where)
        if number < len(devices) - 1:
            stage.norm = torch.nn.Identity()
        model.stages.append((where, stage))
    for layer in base.layers if model.config.hidden_act == "silu" else ():
        layer.mlp.act_fn = _SiLU()
    return model


# ---- Threads of a CPU

def usable_cores(limits: Path = Path("/sys/fs/cgroup")) -> int:
    """How many cores this process may use: the fewest of its affinity, its container's CPU quota
    (rounded up; cgroup v2 or v1, in the folder `limits`) and OMP_NUM_THREADS. No number, no limit.
    """
    found = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()]
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((limits / name).read_text() for name in names).split()
            found.append(-(-int(quota) // int(period)))
    with contextlib.suppress(ValueError):  # "4,2": of the outermost region, then of those inside it
        found.append(int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0]))
    return min(cores for cores in found if cores > 0)


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


# ---- The built-in task and its model

TINY_STEPS = 400  # supervised warm-up: about 10 s on two cores
TINY = {"learning_rate": 2e-4, "max_new_tokens": 8, "micro_batch_groups": 4}  # its defaults


def arithmetic(seed: int, index: int) -> tuple[str, str]:
    """Question and answer number `index` of the endless arithmetic task: `3+8=` and `11`."""
    stream = np.random.Philox(key=[seed, index], counter=[0, 2, 0, 0])  # 2: see `draw_problems`
    a, b = np.random.Generator(stream).integers(0, 10, 2)
    return f"{a}+{b}=", str(a + b)


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
        model = cut_into_stages(attach(LlamaForCausalLM(config).train()), ["cpu"])
    rng = np.random.Generator(np.random.Philox(key=seed, counter=[0, 3, 0, 0]))
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


# ---- The plan: memory of a run, without reading weights

# GiB of a device that is not here.
USUAL_GIB = {"npu": 64.0, "cuda": 80.0}


def layer_bytes(config, tokens: int, queries: int, keys: int, dtype: torch.dtype) -> int:
    """What one layer saves for its backward pass of a micro-batch of T `tokens`, with so many
    places of queries and of keys in attention (`Packed`). As transformers 5.24 computes it."""
    half = dtype.itemsize
    query = _head_size(config) * config.num_attention_heads
    key = _head_size(config) * config.num_key_value_heads
    # Of each norm what goes in and is normalised, in float32; what comes out once in float32, or
    # in a bfloat16 copy for each of the five matrices that take it. Of the MLP gate, its silu, up,
    # and their product. Of attention what the last matrix takes; queries, output, a float of the
    # softmax; keys and values.
    norms = config.hidden_size * (16 + (8 if half == 4 else 5 * half))
    if config.model_type == "qwen3":  # two more, of queries and keys
        norms += (query + key) * (4 + half)
    return (tokens * (norms + half * (4 * config.intermediate_size + query))
            + queries * (2 * half * query + 4 * config.num_attention_heads)
            + keys * 2 * half * key)


def _head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def plan(*, model: str, dtype: str, beta: float, recompute: bool, rows: int, samples: int,
         max_prompt_tokens: int, max_new_tokens: int, micro_batch_tokens: int,
         micro_batch_groups: int, train_devices: str, rollout_devices: str, **_) -> list[tuple]:
    """What every stage of the trainer, then every inference copy, will hold: (role, its layers,
    {part: GiB}). Raises ValueError for a model that has no config to read."""
    train = _device_names(train_devices or str(find_devices("")[0]))
    rollout = _device_names(rollout_devices) if rollout_devices else train[:1]
    try:
        config = AutoConfig.from_pretrained(model)
    except Exception as error:  # as in `load`
        raise ValueError(f"no plan for the model {model}: {_first_line(error)}") from None
    refuse(config)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    dtype = getattr(torch, dtype)
    copied, layers, places = frozen_copy(policy, dtype), config.num_hidden_layers, len(train)
    where, edges = layout(config, range(places)), stage_edges(layers, places)

    def weights(model, stage, dtype=None):
        """Bytes of a stage's, of one dtype or all; a tied one counts once, as the embedding."""
        return sum(p.nbytes for name, p in model.named_parameters() for module, its in where.items()
                   if name.startswith(f"{module}.") and its == stage and dtype in (None, p.dtype))
    # A micro-batch of as many tokens as there may be: keys are its own, and for each response its
    # prompt's; masks are a ladder, each half as high and wide as the second next.
    keys = micro_batch_tokens + micro_batch_groups * samples * max_prompt_tokens
    saved = layer_bytes(config, micro_batch_tokens, micro_batch_tokens, keys, dtype)
    inputs = 4 * config.hidden_size * micro_batch_tokens
    masks = 2 * dtype.itemsize * max_new_tokens * (max_prompt_tokens + max_new_tokens)
    roles = []
    for stage, device in enumerate(train):
        own, flights = weights(policy, stage), places - stage  # 1F1B: one for each stage behind it
        kept = flights * (edges[stage + 1] - edges[stage])
        roles.append((f"{device} train", f"{edges[stage]}-{edges[stage + 1] - 1}", {
            "parameters": own, "gradients": own, "Adam": 2 * own,
            "reference": weights(copied, stage) if beta else 0,
            "bfloat16 weights": weights(copied, stage, torch.bfloat16),
            "activations": (kept * inputs + saved if recompute else kept * saved) + flights * masks,
            "head": 12 * HEAD_CHUNK + 3 * inputs if flights == 1 else 0}))
    token = 2 * layers * config.num_key_value_heads * _head_size(config) * dtype.itemsize
    for device in rollout:
        roles.append((f"{device} generate", f"0-{layers - 1}", {
            "weights": sum(p.nbytes for p in copied.parameters()),
            "slots": token * rows * (max_prompt_tokens + max_new_tokens)}))
    return [(role, which, {part: size / 2**30 for part, size in held.items()})
            for role, which, held in roles]


def memory_plan(**settings) -> tuple[str, dict[str, float], str]:
    """A plan as a table, GiB of each device, and a sentence if one has too little, else ""."""
    totals, lines = defaultdict(float), []
    for role, layers, held in plan(**settings):
        totals[role.split()[0]] += sum(held.values())
        lines.append(f"{role:15} layers {layers:6} "
                     + "  ".join(f"{part} {size:.1f}" for part, size in held.items()))
    over = [f"{name} would hold {total:.1f} GiB of {device_gib(name):.0f}"
            for name, total in totals.items() if total > device_gib(name)]
    helps = ("--recompute, --dtype bfloat16, lower --micro-batch-tokens or --rows, --beta 0, or "
             "more devices would help")
    return "\n".join(lines), dict(totals), f"{'; '.join(over)}: {helps}" if over else ""


def _device_names(listed: str) -> list[str]:
    """npu is npu:0."""
    return [name if ":" in name or name == "cpu" else f"{name}:0"
            for name in listed.replace(" ", "").split(",")]


def device_gib(name: str) -> float:
    """Memory of a device."""
    if name.startswith("cpu"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    try:
        return torch.accelerator.get_memory_info(name)[1] / 2**30
    except (RuntimeError, ValueError, AssertionError):  # none such here
        return USUAL_GIB.get(name.split(":")[0], 64.0)
