"""One period by hand: what `run_period` does, step by step, with every quantity printed.

    python tests/by_hand.py            # then read it in a debugger, line by line

The built-in model, two prompts, four samples each; no event loop, no threads, public functions
alone. Each numbered step names the function that does it in a run.
"""
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from attention import pack, shared_prompt_mask
from grpo import Group, Problem, Response, group_advantages, grpo_loss, math_reward, token_weights
from model import InferenceCopy, TriModel, copy_weights, frozen_copy, load, stop_ids

P, K, LONGEST = 2, 4, 8
show = lambda step, *values: print(f"\n{step}", *values, sep="\n    ")


def main():
    policy, tokenizer = load("tiny")
    copy = InferenceCopy(frozen_copy(policy), stop_ids(policy, tokenizer), rows=P * K,
                         longest_prompt=8, max_new_tokens=LONGEST)
    models = TriModel(policy, reference=frozen_copy(policy))
    problems = [Problem(tuple(tokenizer("3+4=").input_ids), answer="7", key=0, question="3+4="),
                Problem(tuple(tokenizer("9+8=").input_ids), answer="17", key=1, question="9+8=")]
    show("1. problems (draw_problems)", *problems)

    uniforms = np.random.default_rng(0).random((P, K, LONGEST), np.float32)
    for problem in problems:
        copy.submit(problem.key, problem.prompt_ids, uniforms[problem.key])
    ended = [[None] * K for _ in problems]
    while not copy.idle:
        copy.launch()  # the first is a prefill: each prompt once, and the first token of all
        for key, sample, ids, logprobs, finished in copy.finish():
            ended[key][sample] = Response(tuple(ids), tuple(logprobs), finished)
    texts = [[tokenizer.decode(response.ids) for response in responses] for responses in ended]
    show("2. uniforms, and the tokens that they decide (Generator.generate, InferenceCopy)",
         uniforms[0][:, :3], *texts)

    groups = []
    for problem in problems:
        rewards = [math_reward(text.removesuffix("<eos>"), problem.answer)
                   for text in texts[problem.key]]
        groups.append(Group(problem, tuple(ended[problem.key]), tuple(rewards), copy.version))
    advantages = torch.cat([group_advantages(group.rewards) for group in groups])  # (N,)
    show("3. rewards, and advantages, of each group on its own (Scorer, group_advantages)",
         *(group.rewards for group in groups), advantages)

    packed = pack([group.problem.prompt_ids for group in groups],
                  [[response.ids for response in group.responses] for group in groups])
    show("4. one packed row: ids; positions; who may see whom (pack, shared_prompt_mask)",
         packed.input_ids, packed.position_ids,
         *("".join(".#"[int(seen)] for seen in row) for row in shared_prompt_mask(packed)))

    logprobs, old, reference = models.logprobs(packed)  # (A,) each
    sampled = torch.tensor([x for g in groups for r in g.responses for x in r.logprobs])
    show("5. log-probs of the response tokens, and the largest gap to those of sampling (TriModel)",
         logprobs.detach(), (logprobs.detach() - sampled).abs().max())

    weights = token_weights(packed.lengths, torch.ones(P * K), "grpo", P * K, LONGEST)  # (N,)
    loss, _ = grpo_loss(logprobs, old, reference, advantages[packed.response_of],
                        weights[packed.response_of], beta=0.02)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    show("6. weight of a token, by response; the loss, about 0, and its gradient, which is not",
         weights, loss.detach(), norm)

    some = policy.model.norm.weight.detach()[:4]
    before = some.clone()
    torch.optim.AdamW(policy.parameters(), lr=2e-4, weight_decay=0.0).step()
    copy_weights(policy, copy, version=1)  # nothing is in flight: the next period may begin
    show("7. four weights before, after the step, in the copy; its version (step, copy_weights)",
         before, some, copy.model.model.norm.weight[:4], copy.version)


main()
