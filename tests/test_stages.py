"""Several devices in one process: pipeline stages, inference copies, where parameters lie."""
import asyncio
import itertools
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from conftest import (
    DTYPES,
    TIED,
    assert_gradients_agree,
    batch,
    ids,
    small_config,
    small_model,
    step,
)
from test_periodic_async import (
    config,
    gradient_of,
    hashes,
    made_groups,
    made_run,
    made_trainer,
    nudged,
    trained,
    two_steps,
)
from transformers import AutoModelForCausalLM

import model as model_module
import periodic_async
from attention import attach, pack
from grpo import Problem
from model import (
    InferenceCopy,
    TriModel,
    cut_into_stages,
    find_devices,
    frozen_copy,
    layout,
    load,
    stage_edges,
    stages,
    token_logprobs,
)
from periodic_async import (
    Generator,
    Trainer,
    UserError,
    Worker,
    run_periods,
    summary,
    train,
)


def cut(count=1, *, tied=False, **settings):
    """A policy of four layers in stages, all of them on the CPU."""
    settings = {"num_hidden_layers": 4, "tie_word_embeddings": tied} | settings
    return cut_into_stages(attach(small_model(**settings).train()), ["cpu"] * count)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def parameters(model):
    return dict(model.named_parameters())


# --------------------------------------------------------------------------- gradients and scores

SPLITS = {"a group each": {"micro_batch_groups": 1}, "two": {"micro_batch_groups": 2},
          "by tokens": {"micro_batch_groups": 4, "micro_batch_tokens": 24}}


@pytest.mark.slow
@pytest.mark.parametrize("loss, beta, split, counts", [
    ("grpo", 0.0, "a group each", (2, 4)), ("grpo", 0.1, "by tokens", (3,)),
    ("dr_grpo", 0.0, "two", (3,)), ("dr_grpo", 0.1, "a group each", (4,)),
    ("dapo", 0.0, "by tokens", (2,)), ("dapo", 0.1, "two", (4,))])
def test_stages_change_no_bit_of_a_gradient(unclipped, loss, beta, split, counts):
    """A stage that sees another's micro-batch, or a gradient lost at a cut or left over for the
    next inner step: with an untied head 2 to 4 stages give weights, both inner steps' gradients and
    metrics of one, bit for bit; with two micro-batches, which are fewer than stages, too."""
    changes = {"loss": loss, "beta": beta, **SPLITS[split]}
    (_, first), (weights, second), _, metrics = two_steps(cut(), made_groups(4), **changes)
    for count in counts:
        one, two, _, found = two_steps(cut(count), made_groups(4), **changes)
        assert_equal(one[1], first)
        assert_equal(two[0], weights)
        assert_equal(two[1], second)
        assert found == metrics


@pytest.mark.parametrize("loss, beta", [("grpo", 0.1), ("dr_grpo", 0.0), ("dapo", 0.1)])
def test_stages_and_a_tied_head(unclipped, loss, beta):
    """The one weight of two stages: the embedding's part of its gradient comes S - 1 micro-batches
    after the head's, so that sums round differently, and nothing else differs. The second inner
    step is given the weights of one stage: it would start from others in their last bits."""
    changes = {"loss": loss, "beta": beta, "micro_batch_groups": 1}
    (_, first), (weights, second), _, metrics = two_steps(cut(tied=True), made_groups(4), **changes)
    shared = "model.embed_tokens.weight"
    for count in (4,) if loss == "grpo" else (2,):
        one, two, _, found = two_steps(cut(count, tied=True), made_groups(4), update=weights,
                                       **changes)
        assert_gradients_agree(one[1], first, 1e-6)
        assert_gradients_agree(two[1], second, 1e-6)
        del one[1][shared]
        assert_equal(one[1], {name: g for name, g in first.items() if name != shared})
        assert found == pytest.approx(metrics, rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("loss, beta, count", [("grpo", 0.1, 3), ("dapo", 0.0, 2)])
def test_recompute_in_stages(unclipped, loss, beta, count):
    """--recompute, which runs a stage's layers again inside its own backward pass: same bits."""
    changes = {"loss": loss, "beta": beta, "micro_batch_groups": 1}
    (_, first), (_, second), *_ = two_steps(cut(), made_groups(4), **changes)
    policy = cut(count)
    policy.activation_checkpointing_enable()
    calls = []
    policy.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    one, two, *_ = two_steps(policy, made_groups(4), **changes)
    assert len(calls) == (2 * 2 * 4 + 4 if beta else 2 * 2 * 3)  # the reference has the hook, too
    assert_equal(one[1], first)
    assert_equal(two[1], second)


def test_more_stages_than_layers(unclipped):
    """A stage without a layer passes its input on, and the gradient back."""
    groups = made_groups()
    expected = gradient_of(cut(num_hidden_layers=2), groups, micro_batch_groups=1)
    policy = cut(5, num_hidden_layers=2)
    assert min(len(stage.layers) for _, stage in policy.stages) == 0
    assert_equal(gradient_of(policy, groups, micro_batch_groups=1), expected)


def test_periods_follow_each_other():
    """A flight that outlives its period: two periods of two stages move the weights as one's."""
    results = []
    for count in (1, 2):
        trainer = made_trainer(cut(count), prompts=4, micro_batch_groups=1, beta=0.1)
        metrics = [trained(trainer, made_groups(4, version=version))[1] for version in range(2)]
        assert trainer.flights == []
        results.append((parameters(trainer.models.policy), metrics))
    assert_equal(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


@TIED
@DTYPES
def test_all_three_models_score_in_stages(dtype, tied):
    """A norm in the middle, a layer left out or run twice, a copy that runs another's layers:
    policy, reference and old weights in stages have the uncut models' log-probs and entropy."""
    dtype = getattr(torch, dtype)
    packed = pack(*batch([3, 9, 1], [[4, 1], [2], [7, 3, 1]]), multiple=8)

    def scored(count):
        policy = attach(small_model(num_hidden_layers=4, tie_word_embeddings=tied).train())
        if count:
            cut_into_stages(policy, ["cpu"] * count)
        old, reference = (nudged(frozen_copy(policy, dtype), size) for size in (0.01, 0.03))
        sums = {}
        models = TriModel(policy, old, reference, temperature=0.8, dtype=dtype)
        return *models.logprobs(packed, sums, [], forward_old=True), sums["entropy_sum"]
    expected = scored(0)
    for count in (1, 2, 4):
        for found, right in zip(scored(count), expected):
            assert torch.equal(found, right)
    assert min((expected[0] - other).abs().max() for other in expected[1:3]) > 1e-3


# --------------------------------------------------------------------------------- the launches

def launches(count, batches, inner=1):
    """[(stage, micro-batch, forward or backward)] of a period, in the order of launching. What
    backward runs is read off the gradients that it adds to."""
    events, forwards, backwards, policy = [], [0] * count, [0] * count, cut(count)
    trainer = made_trainer(policy, prompts=batches, micro_batch_groups=1, beta=0.0,
                           inner_steps=inner)

    def noted(number, stage):
        def call(**given):
            events.append((number, forwards[number] % batches, "forward"))
            forwards[number] += 1
            return stage(**given)

        def back(_):
            events.append((number, backwards[number] % batches, "backward"))
            backwards[number] += 1
        stage.layers[0].input_layernorm.weight.register_post_accumulate_grad_hook(back)
        return call
    policy.stages = [(where, noted(*numbered)) for where, numbered in
                     zip(["cpu"] * count, enumerate(stage for _, stage in policy.stages))]
    trained(trainer, made_groups(batches + 1)[:batches])  # the last has no gradient
    return events


def one_forward_one_backward(count, batches):
    """The order as the module says it."""
    events = []
    for newest in range(batches + count - 1):
        if newest < batches:
            events += [(stage, newest, "forward") for stage in range(count)]
        for stage in reversed(range(count)):
            number = newest - (count - 1 - stage)
            if 0 <= number < batches:
                events.append((stage, number, "backward"))
    return events


@pytest.mark.parametrize("count, batches, inner", [(1, 3, 2), (2, 4, 2), (3, 1, 2), (4, 2, 1),
                                                   (4, 6, 2)])
def test_order_of_launches(count, batches, inner):
    """A missing or doubled backward pass, a drain left out before an inner step, activations of
    more micro-batches than the plan counts: every stage has S - s in flight at most."""
    events = launches(count, batches, inner)
    assert events == one_forward_one_backward(count, batches) * inner
    for stage in range(count):
        flying = most = 0
        for _, _, kind in (event for event in events if event[0] == stage):
            flying += 1 if kind == "forward" else -1
            most = max(most, flying)
        assert most == min(count - stage, batches) and flying == 0


def busy_share(events, count):
    """Of devices on which a forward pass takes 1 and a backward pass 2, and which do what is
    launched on them one after another, each as soon as its neighbour's part is there."""
    ends, free = {}, [0] * count
    for stage, number, kind in events:
        begin = free[stage]
        if kind == "forward" and stage > 0:
            begin = max(begin, ends[stage - 1, number, kind])
        if kind == "backward" and stage < count - 1:
            begin = max(begin, ends[stage + 1, number, kind])
        free[stage] = ends[stage, number, kind] = begin + (1 if kind == "forward" else 2)
    return sum(1 if kind == "forward" else 2 for *_, kind in events) / (count * max(free))


def test_launches_keep_the_devices_busy(monkeypatch):
    """An order in which one device waits for another's whole backward pass: 16 micro-batches keep 4
    stages busy for 16/19 of the time, 1F1B's ideal; each one's pass at once for a quarter."""
    assert busy_share(launches(4, 16), 4) == pytest.approx(16 / 19)
    backward_passes = Trainer._back_by_one_stage

    def at_once(trainer):
        while trainer.flights:
            backward_passes(trainer)
    monkeypatch.setattr(Trainer, "_back_by_one_stage", at_once)
    assert busy_share(launches(4, 4), 4) == pytest.approx(1 / 4)


# -------------------------------------------------------------------------------- whole periods

@pytest.fixture
def rewarded(monkeypatch):
    """Random responses of one group get different rewards: else no weight would move."""
    monkeypatch.setattr(periodic_async, "math_reward",
                        lambda text, gold: float(sum(map(ord, text)) % 2))


def several(folder, out, count, copies, **changes):
    """A run on so many stages and copies."""
    changes = {"data": str(folder / "sums.jsonl"), "prompt_template": "{question}", "prompts": 3,
               "periods": 2, "max_new_tokens": 4, "micro_batch_groups": 1, "learning_rate": 1e-2,
               "train_devices": ",".join(["cpu"] * count),
               "rollout_devices": ",".join(["cpu"] * copies), **changes}
    return {"folder": folder, "out": out, **changes}


def ran(run, out):
    """What a made run prints last, and its history without times."""
    history = asyncio.run(run_periods(run))
    return summary(run), [(h["reward"], h["gradient_norm"], h["loss"]) for h in history]


@pytest.mark.slow
@TIED
def test_stages_and_copies_change_no_token(folders, rewarded, tmp_path, monkeypatch, tied):
    """A response sampled under other weights, key or row than with one device: every number of
    copies and stages has the same rollouts in both schedules, lending or not. Untied weights are
    equal, too, but for the copies, which decide in which order groups arrive."""
    seen, rollouts = {}, set()
    runs = ((1, 1, "async", True), (2, 2, "async", True), (2, 2, "sync", False)) if tied else (
        (1, 1, "async", True), (4, 1, "sync", False), (2, 2, "async", False), (3, 2, "sync", True),
        (1, 3, "async", False))
    for count, copies, schedule, lending in runs:
        monkeypatch.setattr(periodic_async, "LENDING", lending)
        settings = several(folders[tied], tmp_path, count, copies, schedule=schedule)
        result, history = ran(made_run(**settings), tmp_path)
        assert result["logp_gap_max"] < 1e-4
        rollouts.add(result["rollouts_sha256"])
        digest, before = seen.setdefault((copies, count if tied else 0),
                                         (result["weights_sha256"], history))
        assert digest == result["weights_sha256"] and before == history
        first = seen[1, 1 if tied else 0][1]
        for now, then in zip(history, first):
            assert now == pytest.approx(then, rel=1e-3, abs=1e-5)
    assert len(rollouts) == 1
    if tied:
        return
    still, _ = ran(made_run(**settings | {"learning_rate": 0}), tmp_path)
    assert still["rollouts_sha256"] not in rollouts


def test_a_resumed_run_in_stages(folders, rewarded, tmp_path):
    """What a checkpoint of a cut model leaves out: resumed = uninterrupted, 2 stages, 2 copies."""
    def result(name, **changes):
        return train(config(**several(folders[True], tmp_path / name, 2, 2, **changes)))
    whole = result("whole")
    result("cut", periods=1, save_every=1)
    assert hashes(result("cut", resume=True)) == hashes(whole)


# ------------------------------------------------------------------------------ inference copies

def test_versions_never_mix(folders, rewarded, tmp_path):
    """A copy left behind by an update, or a step under way during one, also when a copy is slow:
    whatever a copy launches is of the trainer's version, every group says so, sampled log-probs
    are the trained ones, and after an update all copies hold the policy, bit for bit."""
    expected = None
    for schedule, slow in (("async", None), ("async", 1), ("sync", 0)):
        run = made_run(**several(folders[False], tmp_path, 2, 2, schedule=schedule))
        generator, trainer, launched, groups = run.generator, run.trainer, [set(), set()], []
        for number, copy in enumerate(generator.copies):
            def launch(number=number, copy=copy, launch=copy.launch):
                time.sleep(0.01 if number == slow else 0)
                assert copy.version == trainer.version
                launched[number].add(copy.version)
                launch()
            copy.launch = launch
        consume, update = trainer.consume, generator.update

        async def consumed(group):
            groups.append(group.version)
            await consume(group)

        async def updated(policy, version):
            await update(policy, version)
            for copy in generator.copies:
                assert copy.version == version == trainer.version
                assert_equal(parameters(copy.model), parameters(policy))
        trainer.consume, generator.update = consumed, updated
        result, history = ran(run, tmp_path)
        assert groups == [0] * 3 + [1] * 3 and launched == [{0, 1}] * 2
        assert result["logp_gap_max"] < 1e-4
        expected = expected or (hashes(result), history)
        assert (hashes(result), history) == expected


def copies_of(policy, count, limit=4):
    return [InferenceCopy(cut_into_stages(frozen_copy(policy), ["cpu"]), [], rows=8,
                          longest_prompt=48, max_new_tokens=limit) for _ in range(count)]


def generator_of(copies):
    timeline = periodic_async.Timeline(Path(os.devnull))
    return Generator(copies, Worker("generate", timeline), 0)


@pytest.mark.parametrize("begun", [False, True], ids=["waiting", "decoding"])
@pytest.mark.parametrize("busy", [0, 1, 2])
def test_an_update_is_refused_whole(busy, begun):
    """A request in flight on any copy: update raises, and no copy has the new weights or version
    while another goes on with the old ones."""
    policy = cut()
    copies = copies_of(policy, 3)
    before = frozen_copy(policy)
    copies[busy].submit("a", ids(5, 1), np.full((2, 4), 0.5, dtype=np.float32))
    if begun:
        step(copies[busy])
    with pytest.raises(RuntimeError, match="in flight"):
        asyncio.run(generator_of(copies).update(nudged(policy), 1))
    assert [copy.version for copy in copies] == [0, 0, 0]
    for copy in copies:
        assert_equal(parameters(copy.model), parameters(before))


LENGTHS = (40, 1, 2, 30, 1, 1, 20, 2, 9)


@pytest.mark.parametrize("count, samples", [(2, 1), (3, 1), (2, 3)])
def test_a_prompt_goes_to_the_least_loaded_copy(count, samples):
    """Prompts dealt out by number, or all to one copy: each goes where the fewest tokens wait, its
    own and those that it may get; the responses are those of one copy."""
    copies, loads, chosen = copies_of(cut(), count), [0] * count, []
    for number, copy in enumerate(copies):
        def submit(ticket, prompt, uniforms, number=number, submit=copy.submit):
            least = min(range(count), key=loads.__getitem__)
            loads[least] += len(prompt) + 4 * samples
            chosen.append((number, least))
            submit(ticket, prompt, uniforms)
        copy.submit = submit
    problems = [Problem(tuple(ids(n, key)), "", key) for key, n in enumerate(LENGTHS)]

    async def generated(copies):
        async with generator_of(copies) as generator, asyncio.timeout(30):
            return await asyncio.gather(*(generator.generate(p, samples) for p in problems))
    found, alone = (asyncio.run(generated(c)) for c in (copies, copies_of(cut(), 1)))
    assert len(chosen) == len(LENGTHS) and all(number == least for number, least in chosen)
    assert {number for number, _ in chosen} == set(range(count))
    for group, expected in zip(found, alone):
        assert [r.ids for r in group] == [r.ids for r in expected]
        for response, right in zip(group, expected):
            assert response.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def test_copies_are_launched_before_one_is_read():
    """The event loop's thread would wait for one device before it starts the next: a step launches
    on all copies that have work, and on none that has not, before it reads the first result."""
    copies, events = copies_of(cut(), 3), []
    for number, copy in enumerate(copies):
        for name in ("launch", "finish"):
            call = getattr(copy, name)

            def noted(call=call, event=(name, number)):
                events.append(event)
                return call()
            setattr(copy, name, noted)
    problems = [Problem(tuple(ids(3, key)), "", key) for key in range(2)]

    async def generated():
        async with generator_of(copies) as generator, asyncio.timeout(30):
            await asyncio.gather(*(generator.generate(p, 2) for p in problems))
    asyncio.run(generated())
    once = [("launch", 0), ("launch", 1), ("finish", 0), ("finish", 1)]
    assert events == once * 4  # a prefill, with the first token, and three steps of decoding


def test_weights_go_to_all_copies_at_once(monkeypatch):
    """On one stream a copy would wait for the one before it: each has a stream of its own on every
    device of the policy and of the copies. The host waits for those devices before, for the step
    ran on another stream, and once all is launched, for generation does (C08: for the copies' own
    devices too, where the last of the weights may still be on their way)."""
    events, current = [], {}
    trained, places = ([torch.device(f"cuda:{n}") for n in numbers]
                       for numbers in ((0, 1), (0, 1, 2, 3)))
    policy = SimpleNamespace(stages=[(where, None) for where in trained])
    copies = copies_of(cut(), 3)
    for copy, where in zip(copies, (2, 3, 3)):
        copy.device = torch.device(f"cuda:{where}")
    generator = generator_of(copies)

    class Stream:
        def __init__(self, where):
            self.where = where

        def __enter__(self):
            current[self.where] = self

        def __exit__(self, *_):
            del current[self.where]

    def copied(src, dst, version):
        assert (src, version) == (policy, 1)
        events.append((dst, [current[where] for where in places]))
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", events.append)
    monkeypatch.setattr(periodic_async, "copy_weights", copied)
    asyncio.run(generator.update(policy, 1))
    assert events[:4] == events[-4:] == places and not current
    found, streams = zip(*events[4:-4])
    assert found == tuple(copies)
    assert len({id(stream) for used in streams for stream in used}) == 4 * 3


# ------------------------------------------------------------------------------ devices and layout

def test_devices():
    """One name twice is two devices; one that is not there is named, not the whole list."""
    assert find_devices("cpu,cpu") == find_devices(" cpu , cpu ") == [torch.device("cpu")] * 2
    for names in ("nowhere:3", "cpu,nowhere:3", "nowhere:3,cpu"):
        with pytest.raises(ValueError, match="no device nowhere:3: "):
            find_devices(names)


@pytest.mark.parametrize("which", ["train_devices", "rollout_devices"])
def test_a_device_that_is_not_there_is_a_users_mistake(random_folder, tmp_path, which):
    """In either flag, behind a good one."""
    with pytest.raises(UserError, match="no device nowhere:3"):
        train(config(random_folder, tmp_path, **{which: "cpu,nowhere:3"}))


def test_stage_edges():
    """Every layer is in one stage; no stage is two layers longer than another; ends not longer."""
    assert stage_edges(28, 3) == [0, 9, 19, 28]
    assert stage_edges(28, 4) == [0, 7, 14, 21, 28]
    for count in range(1, 9):
        for layers in range(count, 65):
            edges = stage_edges(layers, count)
            sizes = [b - a for a, b in itertools.pairwise(edges)]
            assert edges[0] == 0 and edges[-1] == layers and len(sizes) == count
            assert max(sizes) - min(sizes) <= 1


@TIED
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_layout_places_every_parameter_once(architecture, tied):
    """A parameter that stays behind on the first device; a tied embedding away from its head."""
    config = small_config(architecture, num_hidden_layers=5, tie_word_embeddings=tied)
    found = layout(config, ["a", "b", "c"])
    model = AutoModelForCausalLM.from_config(config)
    for name in model.state_dict():
        assert len([module for module in found if name.startswith(module + ".")]) == 1, name
    assert found["model.embed_tokens"] == ("c" if tied else "a")
    assert found["lm_head"] == found["model.norm"] == "c"
    assert [found[f"model.layers.{n}"] for n in range(5)] == ["a", "a", "b", "c", "c"]


def test_place_moves_what_the_layout_says():
    """Here `meta` stands for a second device: layers, norm and head go there, the rest stays, and
    each stage has its own rotary embedding on its device."""
    model = cut_into_stages(attach(small_model(num_hidden_layers=4).train()), ["cpu", "meta"])
    for name, p in model.named_parameters():
        late = re.match(r"model\.layers\.[23]\.|model\.norm|lm_head", name)
        assert p.device.type == ("meta" if late else "cpu"), name
    assert [where.type for where, _ in stages(model)] == ["cpu", "meta"]
    assert [s.rotary_emb.inv_freq.device.type for _, s in stages(model)] == ["cpu", "meta"]


@TIED
def test_place_shares_the_parameters(tied, tmp_path):
    """Stages with weights of their own would not be trained, or not be saved: parameters, their
    names and what is saved stay, also when a cut model is copied, or cut again."""
    model = attach(small_model(num_hidden_layers=4, tie_word_embeddings=tied).train())
    before, names, state = parameters(model), list(model.state_dict()), model.state_dict()
    for count in (3, 1, 4):
        cut_into_stages(model, ["cpu"] * count)
        assert len(stages(model)) == count
    copied = frozen_copy(model)
    for whole in (model, copied):
        assert list(whole.state_dict()) == names
        assert_equal(whole.state_dict(), state)
        assert [id(layer) for _, stage in stages(whole) for layer in stage.layers] == [
            id(layer) for layer in whole.model.layers]
        assert [type(stage.norm) is torch.nn.Identity for _, stage in stages(whole)] == (
            [True] * 3 + [False])
        assert stages(whole)[-1][1].norm is whole.model.norm
    assert parameters(model).keys() == before.keys()
    assert all(p is before[name] for name, p in parameters(model).items())
    assert not {id(p) for p in before.values()} & {id(p) for p in copied.parameters()}
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_equal(stock.state_dict(), state)
    assert tied == (stock.lm_head.weight is stock.model.embed_tokens.weight)


@TIED
@pytest.mark.parametrize("hooked", [False, True], ids=["one device", "several"])
def test_load_in_stages(folders, tied, hooked, monkeypatch):
    """accelerate's hooks, which a map with several devices brings, copy inputs and logits between
    devices and may run a copy through the original's layers: they are gone, and weights, scores
    and a copy's scores are those of a plain load."""
    plain, brought = model_module.AutoModelForCausalLM.from_pretrained, []

    def with_hooks(*args, device_map, **settings):
        model, report = plain(*args, device_map=device_map, **settings)
        if hooked:
            dispatch_model(model, device_map, force_hooks=True)
        brought.extend(m for m in model.modules() if hasattr(m, "_hf_hook"))
        return model, report
    whole, _ = load(str(folders[tied]))
    monkeypatch.setattr(model_module.AutoModelForCausalLM, "from_pretrained", with_hooks)
    loaded, _ = load(str(folders[tied]), find_devices("cpu,cpu,cpu"))
    assert bool(brought) == hooked and len(stages(loaded)) == 3 and len(stages(whole)) == 1
    assert not [m for m in loaded.modules() if hasattr(m, "_hf_hook") or hasattr(m, "_old_forward")]
    assert_equal(loaded.state_dict(), whole.state_dict())
    assert loaded.training and tied == (loaded.lm_head.weight is loaded.model.embed_tokens.weight)
    packed, copied = pack(*batch([3, 5], [[4, 1], [2]])), frozen_copy(loaded)
    expected = token_logprobs(whole, packed)
    assert torch.equal(token_logprobs(loaded, packed), expected)
    nudged(loaded)
    assert torch.equal(token_logprobs(copied, packed), expected)
    assert torch.equal(token_logprobs(cut_into_stages(copied, ["cpu"]), packed), expected)
