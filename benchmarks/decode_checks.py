"""Correctness of the decode kernels on a GPU at real shapes: each against its fp32 twin on fresh random inputs with poisoned outputs.

Each check returns a short line for the table and raises AssertionError where a tolerance of the house table is broken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.decode_random import BLOCK_SIZE, randn, random_choices, random_decode, random_weights, shuffled_table
from benchmarks.prefill_random import gpt_oss_config
from kernels import cuda_library, decode_fused
from kernels.attention_decode import SplitWorkspace, attention_sliding, chunk_blocks, launch_full, num_chunks
from kernels.moe_decode import GROUP_TOKENS, ExpertWeights, launch_experts, pack_mxfp4
from kernels.reference import experts_ref, mxfp4_dequant_ref, paged_attention_ref, rms_norm_ref, route_ref
from kernels.sampling_cuda import SamplingRows, SamplingScratch, gumbel_ref, sample_ref, sample_tokens
from kernels.vocabulary import PARTS, ScreenScratch, choose_words, make_screen, screen_ref, settle_ties

ALPHA, LIMIT = 1.702, 7.0
BATCHES = (1, 2, 3, 7, 8, 33, 128)


def nans(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def errors(got: Tensor, want: Tensor, what: str, largest: float, rms: float) -> str:
    """Asserts on the largest error over the largest value, and on the ratio of root mean squares; NaN never passes."""
    error = (got.float() - want.float()).abs()
    top, mean = float(error.max() / want.abs().max()), float(error.square().mean().sqrt() / want.float().square().mean().sqrt())
    assert top <= largest, f"{what}: max relative {top:.2e} > {largest:.0e} at {int(error.argmax())}"
    assert mean <= rms, f"{what}: RMS relative {mean:.2e} > {rms:.0e}"
    return f"{top:.1e}/{mean:.1e}"


def _moe(experts: int, batches: tuple[int, ...]) -> str:
    matrices = []
    for rows in (5760, 2880):
        blocks = torch.randint(0, 256, (experts, rows, 90, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(120, 123, (experts, rows, 90), dtype=torch.uint8, device="cuda")
        matrices.append((blocks, scales))
    biases = [randn(experts, 5760, std=0.2), randn(experts, 2880, std=0.2)]
    weights = ExpertWeights(pack_mxfp4(*matrices[0], gate_up=True), biases[0], pack_mxfp4(*matrices[1], gate_up=False), biases[1])
    plain = (mxfp4_dequant_ref(*matrices[0]), biases[0].float(), mxfp4_dequant_ref(*matrices[1]), biases[1].float())
    worst = []
    config = gpt_oss_config("20b" if experts == 32 else "120b")
    for batch in batches:
        x, ids = randn(batch, 2880), random_choices(1, batch, config)[0]
        if batch > 2:
            ids = torch.where(ids == 5, -1, ids)
        flat = ids.reshape(-1, 1).long()
        want = experts_ref(x.float().repeat_interleave(4, 0), flat, torch.ones(flat.shape, device="cuda"), *plain).view(batch, 4, -1)
        arrived, outputs, local = torch.zeros(2, dtype=torch.int32, device="cuda"), [], ids >= 0
        for group_tokens in (0, 0, *(n for n in GROUP_TOKENS if batch <= 8 or n > 8)):
            hidden, out = nans(batch * 4, 2880), nans(batch, 4, 2880)
            launch_experts(x, ids, weights, hidden, arrived, out, alpha=ALPHA, limit=LIMIT, group_tokens=group_tokens)
            assert not arrived.any(), "the kernel left its counters raised"
            assert out[~local].isnan().all(), "rows without an expert were written"
            worst.append(errors(out[local], want[local], f"E{experts} B{batch}", 2e-2, 4e-3))
            outputs.append(out[local])
        assert all(torch.equal(outputs[0], other) for other in outputs[1:]), f"B{batch}: two runs or two instances differ"
    return f"{len(worst)} cases, worst {max(worst)}; runs and instances equal"


def check_moe_20b() -> str:
    return _moe(32, BATCHES)


def check_moe_120b() -> str:
    return _moe(128, (1, 8, 33, 64))


def check_dense() -> str:
    worst = []
    weight, bias, inv_freq = randn(5120, 2880, std=0.02), randn(5120, std=0.1), torch.rand(32, device="cuda")
    o_weight, o_bias, head = randn(2880, 4096, std=0.02), randn(2880, std=0.1), randn(201088, 2880, std=0.02)
    for batch in (1, 3, 8, 16, 33, 128):
        x, slots = randn(batch, 2880), torch.randperm(256 * BLOCK_SIZE, device="cuda")[:batch].int()
        if batch > 2:
            slots[1] = -1
        angle = torch.randint(0, 9000, (batch, 1), device="cuda") * inv_freq
        cos_sin = torch.stack((angle.cos(), angle.sin()), -1).contiguous() * 1.3
        results = []
        for kernels in (True, False):
            q, pool = nans(batch, 64, 64), nans(256, 2, 8, BLOCK_SIZE, 64)
            run = decode_fused.qkv_rope_write if kernels else decode_fused._qkv_on_cpu
            run(x, weight, bias, pool, slots, cos_sin, q, **({"scratch": nans(batch, 5120)} if kernels else {}))
            results.append((q, pool))
        assert torch.equal(results[0][1].isnan(), results[1][1].isnan()), "K/V written elsewhere"
        worst.append(errors(results[0][0], results[1][0], f"q B{batch}", 2e-2, 4e-3))
        worst.append(errors(results[0][1].nan_to_num(), results[1][1].nan_to_num(), f"kv B{batch}", 2e-2, 4e-3))
        a, residual = randn(batch, 4096), randn(batch, 2880)
        want = residual.float() + a.float() @ o_weight.float().t() + o_bias.float()
        decode_fused.output_projection(a, o_weight, o_bias, residual, scratch=nans(batch, 2880))
        worst.append(errors(residual, want, f"o B{batch}", 2e-2, 4e-3))
        logits = nans(batch, 201088, dtype=torch.float32)
        decode_fused.vocabulary_logits(x, head, logits)
        worst.append(errors(logits, x.float() @ head.float().t(), f"logits B{batch}", 1e-4, 1e-4))
    return f"worst {max(worst)}"


def check_route_and_combine() -> str:
    for experts, batch in ((32, 1), (128, 3), (128, 8), (32, 33), (128, 128)):
        x, norm, weight, bias = randn(batch, 2880), 1 + randn(2880, std=0.1), randn(experts, 2880, std=0.02), randn(experts)
        normed, logits = nans(batch, 2880), nans(batch, experts, dtype=torch.float32)
        arrived = torch.zeros(16, dtype=torch.int32, device="cuda")
        ids, weights = torch.full((batch, 4), 999, dtype=torch.int32, device="cuda"), nans(batch, 4, dtype=torch.float32)
        slots = torch.arange(batch, dtype=torch.int32, device="cuda")
        slots[batch // 2 + 1 :: 4] = -1
        decode_fused.norm_route(
            x, norm, weight, bias, slots, eps=1e-5, normed=normed, logits=logits, arrived=arrived, expert_ids=ids, expert_weights=weights
        )
        errors(normed, rms_norm_ref(x, norm, 1e-5), "normed", 1e-2, 2e-3)
        errors(logits, normed.float() @ weight.float().t() + bias.float(), "router logits", 1e-4, 1e-4)
        want_ids, want_weights = route_ref(logits, 4)
        live = slots >= 0
        assert torch.equal(ids[live], want_ids[live].int()), "experts differ"
        assert (ids[~live] == -1).all(), "padded rows routed"
        errors(weights[live], want_weights[live], "expert weights", 1e-5, 1e-5)
        assert not arrived.any()
        pairs, residual = randn(batch, 4, 2880), randn(batch, 2880)
        want = residual.float() + torch.where(live[:, None], (pairs.float() * weights[..., None]).sum(1), 0.0)
        decode_fused.combine_norm(pairs, ids, weights, residual, norm, eps=1e-5, first_expert=0, num_local_experts=experts, normed=normed)
        errors(residual, want, "combine", 1e-2, 4e-3)
        errors(normed, rms_norm_ref(residual, norm, 1e-5), "norm after combine", 1e-2, 2e-3)
    return "ids exact, ties and padding right"


def _attention_case(lens: list[int], starts: list[int]):
    width = max(-(-(n - s) // BLOCK_SIZE) for n, s in zip(lens, starts, strict=True))
    table = shuffled_table(len(lens), max(width, 9))
    pool = randn(table.numel(), 2, 8, BLOCK_SIZE, 64)
    for b, (n, s) in enumerate(zip(lens, starts, strict=True)):  # what no sequence holds is NaN
        used, tail = divmod(n - s, BLOCK_SIZE)
        if tail:
            pool[table[b, used].long(), :, :, tail:] = float("nan")
            used += 1
        pool[table[b, used:].long()] = float("nan")
    as_int = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
    return 2 * randn(len(lens), 64, 64), pool, table, as_int(starts), as_int(lens), randn(64, dtype=torch.float32)


def _reference(q, pool, table, starts, lens, sink, window):
    bounds = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return paged_attention_ref(q.float(), pool, table, starts, lens, bounds, sink, window=window, sm_scale=0.125)


def _sliding(q, pool, table, starts, lens, sink):
    return attention_sliding(q, pool, table, starts, lens, sink, nans(*q.shape), window=128, sm_scale=0.125)


def check_sliding_attention() -> str:
    lens = [1, 15, 16, 17, 127, 128, 129, 143, 144, 145, 255, 256, 257, 8191, 8192, 8193]
    starts = [max(0, (n - 128) // BLOCK_SIZE * BLOCK_SIZE) for n in lens]
    case = _attention_case(lens, starts)
    line = errors(_sliding(*case), _reference(*case, 128), "sliding", 1e-2, 5e-3)
    for position, is_seen in ((300 - 129, False), (300 - 128, True)):
        q, pool, table, starts, seq_lens, sink = _attention_case([300], [0])
        block, offset = int(table[0, position // BLOCK_SIZE]), position % BLOCK_SIZE
        pool[block, 0, 0, offset], pool[block, 1, 0, offset] = 3 * q[0, 0], 100.0
        out = _sliding(q, pool, table, starts, seq_lens, sink)
        assert (float(out[0, 0].float().mean()) > 50) == is_seen, f"key L-{300 - position}: seen {not is_seen}"
    q, pool, table, starts, seq_lens, sink = _attention_case([100], [0])
    pool[:, 1] = torch.where(pool[:, 1].isnan(), pool[:, 1], 1.0)
    out = _sliding(torch.zeros_like(q), pool, table, starts, seq_lens, torch.zeros_like(sink))
    assert (out.float() - 100 / 101).abs().max() < 4e-3, "the sink does not count once"
    return f"{line}; window and sink exact"


def check_full_attention() -> str:
    lines = []
    for lens in ([1, 127, 128, 129, 511, 512, 513, 8192, 5000], [8192] * 32, [40000], [1025, 0, 17]):
        q, pool, table, starts, seq_lens, sink = _attention_case(lens, [0] * len(lens))
        want = _reference(q, pool, table, starts, seq_lens, sink, None).masked_fill((seq_lens == 0)[:, None, None], 0.0)
        workspace = SplitWorkspace.allocate(len(lens), 8, sum(lens), "cuda")
        size = chunk_blocks(len(lens), 8)
        workspace.cu_chunks[: len(lens) + 1] = torch.tensor([0, *(num_chunks(n, size) for n in lens)], device="cuda").cumsum(0)
        out = nans(*q.shape)
        launch_full(q, pool, table, seq_lens, sink, out, workspace, sm_scale=0.125, group=8)
        lines.append(errors(out, want, f"full {lens[:4]}", 1e-2, 5e-3))
        assert not workspace.arrived.any()
        assert not workspace.tickets.any()
        if size != chunk_blocks(1, 8):
            continue
        alone = SplitWorkspace.allocate(1, 8, lens[0], "cuda")
        alone.cu_chunks[1] = num_chunks(lens[0], size)
        one = nans(*q[:1].shape)
        launch_full(q[:1], pool, table[:1], seq_lens[:1], sink, one, alone, sm_scale=0.125, group=8)
        launch_full(q, pool, table, seq_lens, sink, out, workspace, sm_scale=0.125, group=8)
        assert torch.equal(one[0], out[0]), "a row depends on its batch"
    return f"worst {max(lines)}; batch-invariant"


def check_sampling() -> str:
    logits = 3 * randn(8, 201088, dtype=torch.float32)
    logits[3, 77] = float("nan")
    rows = SamplingRows.greedy(8, "cuda")
    for name, values in {
        "temperature": [0.0, 1.0, 0.7, 1.0, 1.3, 1.0, 1.0, 1.0], "top_k": [0, 50, 0, 0, 0, 20, 0, 0], "top_p": [1, 1, 0.9, 1, 1, 0.8, 1, 1],
        "min_p": [0, 0, 0, 0, 0.05, 0.01, 0, 0], "seed": list(range(8)),
    }.items():  # fmt: skip
        getattr(rows, name).copy_(torch.tensor(values))
    seq_lens = torch.tensor([5, 6, 7, 8, 9, 10, 0, 12], dtype=torch.int32, device="cuda")
    tokens = sample_tokens(logits, rows, seq_lens, torch.full_like(seq_lens, 777777), SamplingScratch.allocate(8, "cuda"), unfiltered=False)
    want = sample_ref(logits, SamplingRows(*(getattr(rows, n).cpu() for n in rows.__dataclass_fields__)), seq_lens.cpu())
    assert tokens.cpu().tolist() == want.tolist(), f"{tokens.tolist()} != {want.tolist()}"
    return f"tokens {tokens.tolist()} equal the twin's"


def check_vocabulary() -> str:
    """Screened words of the real vocabulary, greedy and sampled, against fp64, with rows one bit apart, a NaN and a padded row; and what
    `settle_ties` makes of the library's logits."""
    weight = randn(201088, 2880, std=0.02)
    least, most = 1 << 30, 0
    for batch in (1, 2, 7, 8, 9, 16):
        x, rows = randn(batch, 2880), SamplingRows.greedy(batch, "cuda")
        rows.temperature[3:] = torch.linspace(0.5, 1.5, max(0, batch - 3), device="cuda")
        rows.seed.copy_(torch.arange(batch))
        weight[5000:5100] = (x[0] * 0.03).bfloat16()
        weight[5071].view(torch.int16)[int(x[0].float().abs().argmax())] += 1  # one bit away from zero: the largest of a hundred twins
        screen, scratch = make_screen(weight), ScreenScratch.allocate(batch, "cuda")
        exact = torch.cat([x.double() @ part.double().t() for part in weight.split(20000)], dim=1)
        seq_lens = torch.full((batch,), 9, dtype=torch.int32, device="cuda")
        noise = torch.stack([gumbel_ref(seed, 9, 201088) for seed in range(batch)]).cuda()
        inverse = torch.where(rows.temperature > 0, 1 / rows.temperature, 1.0)[:, None]
        judged = exact * inverse + noise * (rows.temperature > 0)[:, None]
        want = judged.argmax(dim=1).int()
        if batch > 2:
            seq_lens[1], want[1], x[2, 77], want[2] = 0, 0, torch.nan, -1
        bounds = torch.full((batch, 201088), torch.nan, device="cuda")
        tokens, best = torch.full_like(seq_lens, 777777), torch.full((batch, PARTS), torch.nan, device="cuda")
        for _ in range(2):
            choose_words(x, weight, screen, rows, seq_lens, bounds=bounds, scratch=scratch, tokens=tokens, best=best)
            assert torch.equal(tokens, want), f"B{batch}: {tokens.tolist()} != {want.tolist()}"
        kept = torch.arange(batch, device="cuda")[want > 0]
        assert ((best[kept, 0] - judged[kept].amax(dim=1)).abs() < 1e-5 * judged[kept].abs().amax(dim=1)).all()
        assert (bounds[kept] >= exact[kept]).all(), "a logit lies above its bound"
        chosen = best[:, 0].clone()
        logits, sampling = torch.mm(x, weight.t(), out_dtype=torch.float32), SamplingScratch.allocate(batch, "cuda")
        sample_tokens(logits, rows, seq_lens, tokens, sampling, unfiltered=False)
        settle_ties(x, weight, screen, logits, rows, seq_lens, scratch=scratch, tokens=tokens, best=sampling.best)
        assert torch.equal(tokens, want), f"B{batch} settled: {tokens.tolist()} != {want.tolist()}"
        assert torch.equal(sampling.best[kept, 0], chosen[kept]), "another sum than the screened one"
        factor, drawn = inverse[kept], (noise * (rows.temperature > 0)[:, None])[kept]
        floor = (screen_ref(x[kept], screen)[1] * factor + drawn).amax(dim=1, keepdim=True)
        left = (bounds[kept] * factor + drawn >= floor).sum(dim=1)
        least, most = min(least, int(left.min())), max(most, int(left.max()))
    return f"words are fp64's, {least} to {most} of 201,088 looked at twice"


def check_step(experts: str = "mxfp4", largest: float = 5e-2, rms: float = 2e-2) -> str:
    """Four layers of 20b: graph against eager, a row against its batch, the whole against the plain twins."""
    config = gpt_oss_config("20b", 4)
    weights = random_weights(config, experts)
    lines = []
    for rows in (8, 33):
        decode = random_decode(config, weights, rows, 1000)
        first = decode.token_ids.clone()
        decode.step(rows, needs_logits=True)
        eager, tokens = decode.logits[:rows].clone(), decode.token_ids.clone()
        for needs_logits in (True, False):
            decode.token_ids.copy_(first)
            decode.capture(rows, needs_logits=needs_logits)
            for _ in range(2):
                decode.token_ids.copy_(first)
                decode.logits.fill_(float("nan"))
                decode.replay(rows, needs_logits=needs_logits)
                assert not needs_logits or torch.equal(decode.logits[:rows], eager), "graph replay differs from eager"
                assert torch.equal(decode.token_ids, tokens), "greedy rows choose another word than beside sampled ones"
        if rows == 8:
            decode.token_ids.copy_(first)
            decode.step(3, needs_logits=True)
            assert torch.equal(decode.logits[:3], eager[:3]), "a row depends on its batch"
            decode.token_ids.copy_(first)
            decode.inputs.seq_lens[5:] = 0
            decode.step(8, needs_logits=True)
            assert torch.equal(decode.logits[:5], eager[:5]), "padded rows change others"
            decode.inputs.seq_lens[5:] = 1000
        decode.token_ids.copy_(first)
        runs, cuda_library.runs = cuda_library.runs, lambda tensor: False
        try:
            decode.step(rows, needs_logits=True)
        finally:
            cuda_library.runs = runs
        lines.append(f"B{rows} {errors(eager, decode.logits[:rows], f'step B{rows}', largest, rms)}")
    return "graph == eager, batch-invariant to 16 rows; against twins " + ", ".join(lines)


def check_served_model(weights: str = "mxfp4") -> str:
    """The serving side needs more packages than the kernels: without them this check alone fails."""
    from benchmarks.decode_served import check_served

    return check_served(weights=weights)


CHECKS: dict[str, Callable[[], str]] = {
    "dense products": check_dense,
    "route, combine": check_route_and_combine,
    "sliding attention": check_sliding_attention,
    "full attention": check_full_attention,
    "sampling": check_sampling,
    "vocabulary": check_vocabulary,
    "experts 20b": check_moe_20b,
    "experts 120b": check_moe_120b,
    "whole step": check_step,
    "tiny model served": check_served_model,
}
