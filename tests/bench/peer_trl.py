"""Our loss beside TRL's, on one batch: equal values, gradients, advantages and clip shares.

    pip install pytest trl datasets && python tests/bench/peer_trl.py     # written for TRL 1.16.0

The batch enters TRL as a rollout and a reward function; all behind that is TRL's own code: padding,
advantages, the reference's log-probs, `compute_loss`. Ours is the real `Trainer`: micro-batches,
the loss of an inner step (`old` is given, so the ratio is not 1), the scaling before the optimizer
step. What TRL does in another way:
1. KL: by default it multiplies k3 by the ratio (`use_bias_correction_kl`, arXiv 2512.02556), which
   changes the gradient even at a ratio of 1. Ours is the GRPO paper's. Switched off here.
2. Advantages: both divide by std + 1e-4. Dr. GRPO does not divide: ours follows the loss, in TRL it
   is an option. Equal rewards give exact zeros in ours, in TRL what rounding left (3e-4 for eight
   of 0.35). Here they are 1.0.
3. Divisors: it takes the mean of a micro-batch, then of the micro-batches; our weights are those of
   a period. So TRL gets the batch whole, ours in pieces. `dr_grpo`: the length limit, in both.
   `dapo`: all unmasked tokens; TRL counts them first, ours last, and scales the gradient.
4. Truncated is what ends in neither EOS nor padding; ours records it. Both count it in P*K.
5. Positions count the padding on the left. A rotary embedding sees distances alone.
6. Where vLLM samples, its default masks responses by their importance ratio. Ours has what is its
   token_truncate: --importance-cap, in every second row here, with old log-probs that are not the
   sampled ones. Both multiply the surrogate by it, and not the KL.
7. Not in ours, and off: entropy bonus and mask, two-sided clip, sequence ratios, bfloat16 (TRL's
   default).
"""
import copy
import itertools
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
import periodic_async
from attention import attach
from grpo import LOSSES, Group, Problem, Response, group_advantages
from model import TriModel, frozen_copy
from periodic_async import Config, Trainer

try:
    import trl
    from conftest import VOCAB, batch, separate_logprobs, small_model
    from datasets import Dataset
except ImportError as error:
    print(f"error: this comparison needs trl, datasets and pytest: {error}", file=sys.stderr)
    sys.exit(2)

EOS, PAD = VOCAB, VOCAB + 1  # two ids that no random prompt or response holds
LIMIT, TEMPERATURE, BETA, CLIP_LOW, CLIP_HIGH = 24, 0.8, 0.04, 0.2, 0.28
LENGTHS = [(5, 1, 17, 9), (12, 3, 8, 20), (4, 11, 2, 6)]
REWARDS = [(1.0, 0.0, 0.0, 1.0), (0.3, -1.5, 2.0, 0.9), (1.0, 1.0, 1.0, 1.0)]
LIMITS = {"losses": 1e-5, "clip_shares": 1e-6, "advantages": 1e-6,
          "gradients": 1e-4}  # the last relative, and of every parameter on its own
# log(ratio), in turn: on both sides of both edges for either sign of the advantage, and never so
# near to an edge that a rounding decides.
SHIFTS = (-0.5, 0.1, 0.23, -0.23, -0.1, 0.5)
CAP = 1.5
DRIFTS = (-0.6, 0.0, 0.3, 0.6, 1.0)  # old - sampled, in turn, on both sides of log(CAP)


def made_groups(policy):
    """Groups whose responses have old log-probs at the ratios of SHIFTS, and sampled ones DRIFTS
    below those; every third did not finish."""
    prompts, responses = batch((7, 3, 9), LENGTHS)
    responses = [[ids if i == 2 else [*ids[:-1], EOS] for i, ids in enumerate(samples)]
                 for samples in responses]
    with torch.no_grad():
        logprobs = separate_logprobs(policy, prompts, responses, TEMPERATURE).tolist()
    sampled = (x - shift - drift for x, shift, drift in
               zip(logprobs, itertools.cycle(SHIFTS), itertools.cycle(DRIFTS)))
    return [Group(Problem(tuple(prompt), "", 0), tuple(
        Response(tuple(ids), tuple(itertools.islice(sampled, len(ids))), ids[-1] == EOS)
        for ids in samples), rewards, 0)
        for prompt, samples, rewards in zip(prompts, responses, REWARDS)]


def old_logprobs(groups):
    """Of each response."""
    drifts = itertools.cycle(DRIFTS)
    return [torch.tensor([x + next(drifts) for x in r.logprobs])
            for g in groups for r in g.responses]


def theirs(policy, folder, groups, kind, masked, cap):
    """TRL's loss, clip shares, advantages, gradients. The reference is what `folder` holds."""
    rows = [(list(g.problem.prompt_ids), r) for g in groups for r in g.responses]
    rollout = {"prompt_ids": [prompt for prompt, _ in rows],
               "completion_ids": [list(r.ids) for _, r in rows],
               "logprobs": [r.logprobs for _, r in rows]}
    config = trl.GRPOConfig(
        folder, loss_type=kind, scale_rewards="none" if kind == "dr_grpo" else "group", beta=BETA,
        epsilon=CLIP_LOW, epsilon_high=CLIP_HIGH, use_bias_correction_kl=False, bf16=False,
        mask_truncated_completions=masked, max_completion_length=LIMIT, temperature=TEMPERATURE,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=CAP, vllm_importance_sampling_clip_min=None,
        per_device_train_batch_size=len(rows), num_generations=4, use_cpu=True, report_to="none")
    trainer = trl.GRPOTrainer(
        policy, lambda **_: [reward for g in groups for reward in g.rewards], config,
        Dataset.from_list([{"prompt": ""}]), rollout_func=lambda *_: rollout,
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"eos": EOS, "pad": PAD}, "pad")),
            eos_token="eos", pad_token="pad"))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # `train` would set it
    inputs = trainer._generate_and_score_completions([{"prompt": ""}] * len(rows))
    old = inputs["old_per_token_logps"] = pad_sequence(old_logprobs(groups), batch_first=True)
    if cap:  # as TRL makes it of a rollout by vLLM
        trainer.use_vllm = True
        inputs["importance_sampling_ratio"] = (
            old - inputs["sampling_per_token_logps"]).exp().clamp(
                max=trainer.vllm_importance_sampling_clip_max)
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = trainer._metrics["train"]
    shares = [metrics[f"clip_ratio/{side}_mean"][0] for side in ("low", "high")]
    return (loss.detach(), torch.tensor(shares), inputs["advantages"],
            {name: p.grad for name, p in policy.named_parameters()})


def ours(policy, reference, groups, kind, masked, cap):
    """The same of our `Trainer`, which gets the groups one by one and splits the long ones."""
    config = Config(loss=kind, beta=BETA, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, prompts=3,
                    samples=4, max_new_tokens=LIMIT, mask_truncated=masked, inner_steps=2,
                    learning_rate=0.0, micro_batch_tokens=40, importance_cap=cap).checked()
    trainer = Trainer(TriModel(attach(policy), None, frozen_copy(attach(reference)),
                               temperature=TEMPERATURE), None, config)
    for group in groups:
        trainer._train([group])  # the first pass, at a ratio of 1; it scores the reference
    assert len(trainer.batches) > len(groups), "no group was split"
    trainer.optimizer.zero_grad(set_to_none=False)  # the embedding would get a sparse one
    trainer.sums, found = {}, {}
    old = torch.cat(old_logprobs(groups))
    for micro_batch in trainer.batches:
        micro_batch.old, old = old.tensor_split([len(micro_batch.sampled)])
        trainer._forward_backward(micro_batch)
    trainer.optimizer.register_step_pre_hook(lambda *_: found.update(
        (name, p.grad.clone()) for name, p in policy.named_parameters()))
    trainer._optimizer_step()
    sums = trainer.sums
    assert not cap or 0 < sums["importance_capped_tokens"] < sums["kept_tokens"], "no cap at work"
    shares = torch.stack([sums["clip_low_tokens"], sums["clip_high_tokens"]]) / sums["kept_tokens"]
    advantages = torch.cat([group_advantages(g.rewards, scale=kind != "dr_grpo") for g in groups])
    return sums["loss"] * trainer._loss_scale(), shares, advantages, found


def compare(kind, masked, cap, left, right):
    """Prints a row of the table, returns its differences. Raises SystemExit where one is large."""
    *values, expected = left
    *our_values, found = right
    assert found.keys() == expected.keys() and our_values[1].min() > 0, "no token is clipped"
    apart = [float((a - b).abs().max()) for a, b in zip(values, our_values)]
    apart.append(float(torch.stack([(found[name] - gradient).norm() / gradient.norm()
                                    for name, gradient in expected.items()]).max()))
    print(f"{kind:8}{masked!s:>7}{cap:5}{values[0]:12.7f}{our_values[0]:12.7f}{apart[0]:11.1e}"
          f"{apart[3]:10.1e}{apart[2]:11.1e}{our_values[1][0]:10.3f}{our_values[1][1]:7.3f}")
    for what, error in zip(LIMITS, apart):
        if not error <= LIMITS[what]:  # a NaN, too
            sys.exit(f"error: TRL's and our {what} differ by {error:.1e}, more than {LIMITS[what]}")
    return apart


def main():
    warnings.simplefilter("ignore")  # TRL's, of what is deprecated in transformers
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # `rollout_func` may change
    periodic_async.CLIP_NORM = float("inf")  # TRL clips the gradient's norm elsewhere
    policy, reference = (small_model("qwen2", vocab_size=VOCAB + 2).train() for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.02 * torch.randn(p.shape, generator=generator)
    groups = made_groups(policy)
    print(f"TRL {trl.__version__}, a small random Qwen2, float32, 3 prompts x 4 responses\n"
          f"{'loss':8}{'masked':>7}{'cap':>5}{'TRL':>12}{'ours':>12}{'difference':>11}"
          f"{'gradient':>10}"
          f"{'advantage':>11}{'clip low':>10}{'high':>7}")
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        policy.config._name_or_path = folder  # where TRL takes the reference from
        rows = [compare(kind, masked, cap,
                        theirs(copy.deepcopy(policy), folder, groups, kind, masked, cap),
                        ours(copy.deepcopy(policy), copy.deepcopy(reference), groups, kind, masked,
                             cap))
                for kind in LOSSES for masked in (False, True) for cap in (0.0, CAP)]
    print(json.dumps({"trl": trl.__version__} | {
        f"{what}_apart": worst for what, worst in zip(LIMITS, map(max, zip(*rows)))}))


if __name__ == "__main__":
    main()
