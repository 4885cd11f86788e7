"""Other peers and floors on one H200: FlashInfer's fused_kda_decode (CuTe DSL) and fla's recurrence beside
stock, FA3's MLA core beside FlashMLA, launch floors in a CUDA graph, and the composed stock layer without
side streams.

    python3 -m k3_decode.peers.bench_extra OUT.json        README.md says how to unpack the peers first
"""

import json
import os
import pathlib
import sys
import time
import traceback
import types

import torch
import triton
import triton.language as tl

from k3_decode.peers.flash_attention import fa3_mla, make_schedule
from k3_decode.peers.stock_kernels import StockKernels, maybe_execute_in_parallel, pack_root
from k3_decode.peers.stock_layer import (
    BS,
    EPS,
    HID,
    MLA_SCALE,
    PAGE,
    D,
    StockLayer,
    bf16,
    common_state,
    dev,
    dims,
    kda_state,
    make_attn,
    make_attn_mla_small,
    make_attn_small,
    make_moe,
    mla_state,
)
from k3_decode.peers.timing import capture, relative_error, time_graph


def load_flashinfer_kda():
    """FlashInfer's fused_kda_decode module without importing FlashInfer, its head guard widened to 6 heads
    (TP16)."""
    root = os.environ.get("FI_ROOT", os.path.join(pack_root(), "fi"))
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.kda_kernels"):
        m = types.ModuleType(name)
        m.__path__ = [os.path.join(root, *name.split("."))]
        sys.modules[name] = m
    cake = types.ModuleType("flashinfer.jit.cake_fused_kda_decode")
    for n in ("CakeFusedKDADecodeStateIndicesMode", "CakeFusedKDADecodeTarget", "CakeFusedKDADecodeVariant"):
        setattr(cake, n, object)
    for n in (
        "cake_fused_kda_decode_grid",
        "cake_fused_kda_decode_lower_bound_log2",
        "get_cake_fused_kda_decode_variants",
        "load_cake_fused_kda_decode_module",
        "select_cake_fused_kda_decode_variant",
    ):
        setattr(cake, n, None)
    core = types.ModuleType("flashinfer.jit.cute_dsl_core")
    core.build_and_load_cute_dsl_kernel = lambda mod, name, fn, extra_key_files=(): fn()
    utils = types.ModuleType("flashinfer.utils")
    utils.get_compute_capability = torch.cuda.get_device_capability
    for module in (cake, core, utils):
        sys.modules[module.__name__] = module
    from flashinfer.kda_kernels import fused_kda_decode

    fused_kda_decode._SUPPORTED_HEADS = (*fused_kda_decode._SUPPORTED_HEADS, 6)
    return fused_kda_decode


def flashinfer_kda_core(fi, mixed, g, g1, beta, L, st):
    """FlashInfer's KDA core on the tensors of StockLayer.kda_core -> [B, P]; the same state and conv-state
    update."""
    B, P = g1.shape
    H = P // D
    o = torch.empty(1, B, H, D, device=dev, dtype=bf16)
    fi.run_fused_kda_decode(
        mixed,
        L["conv_wm"],
        L["conv_state"].transpose(-1, -2),
        g1.view(1, B, H, D),
        beta.unsqueeze(0),
        L["A_log"],
        L["dt_bias"],
        st["slots"],
        L["state"],
        g.unflatten(-1, (H, D)),
        L["onorm_f"],
        -5.0,
        EPS,
        o,
    )
    return o.view(B, P)


@triton.jit
def _noop(x, launch_pdl: tl.constexpr):
    if launch_pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch_floors():
    """Microseconds of an empty kernel in a graph, with and without programmatic dependent launch, and of a
    fork and join."""
    x = torch.zeros(1, device=dev)
    n = 200

    def empty_kernels(grid, pdl):
        return time_graph(capture(lambda: [_noop[(grid,)](x, launch_pdl=pdl) for _ in range(n)]), n)["us"]

    r = {
        f"noop_pdl{int(pdl)}_grid{grid}": empty_kernels(grid, pdl)
        for pdl in (False, True)
        for grid in (1, 132)
    }
    aux = torch.cuda.Stream()
    ev = [torch.cuda.Event() for _ in range(2)]

    def forkjoin():
        for _ in range(n):
            maybe_execute_in_parallel(
                lambda: _noop[(1,)](x, launch_pdl=False),
                lambda: _noop[(1,)](x, launch_pdl=False),
                ev[0],
                ev[1],
                aux,
            )

    r["fork_join_noop_pair"] = time_graph(capture(forkjoin), n)["us"]
    return {k: round(v, 3) for k, v in r.items()}


def kda_cell(S, fi, d, B):
    """Stock, FlashInfer and fla on the same L2-cold states: microseconds, and FlashInfer's difference from
    stock."""
    H, P = d["H"], d["P"]
    n = StockLayer(S, d["tp"], B)
    st = common_state(B)
    ns = max(4, min(160, int(250e6 / (B * H * 65536)) + 1))
    Ls = [make_attn_small(d) for _ in range(ns)]
    for L in Ls:
        kda_state(d, B, L)
    p = torch.randn(B, d["n_in"], device=dev, dtype=bf16)
    mixed, g, _, beta = p.split([3 * P, P, D, H] + ([d["pad"]] if d["pad"] else []), dim=-1)[:4]
    g1 = torch.randn(B, P, device=dev, dtype=bf16)
    by = B * (2 * 4 * H * D * D + 2 * 2 * 9 * P)
    r = {}

    def time_cores(call):
        return time_graph(capture(lambda: [call(L) for L in Ls], 1), ns, min_ms=12, samples=9)["us"]

    def flashinfer(L):
        return flashinfer_kda_core(fi, mixed, g, g1, beta, L, st)

    def stock(L):
        return n.kda_core(mixed, g, g1, beta, L, st)

    try:
        L = Ls[0]
        s0, c0 = L["state"].clone(), L["conv_state"].clone()
        o1 = flashinfer(L)
        s1, c1 = L["state"].clone(), L["conv_state"].clone()
        L["state"].copy_(s0)
        L["conv_state"].copy_(c0)
        o2 = stock(L)
        r["rel_out"], r["rel_state"] = relative_error(o1, o2), relative_error(s1, L["state"])
        r["conv_equal"] = bool(torch.equal(c1, L["conv_state"]))
        us = time_cores(flashinfer)
        r["flashinfer_us"], r["TBps"] = round(us, 3), round(by / us / 1e6, 3)
    except Exception as ex:  # noqa: BLE001 - one peer that fails must not hide the others; it is reported
        r["flashinfer_err"] = f"{type(ex).__name__}: {str(ex)[:400]}"
    r["stock_us"] = round(time_cores(stock), 3)
    try:
        from fla.ops.kda import fused_recurrent_kda

        q, k, v = torch.randn(3, B, 1, H, D, device=dev, dtype=bf16).unbind(0)
        gg = torch.randn(B, 1, H, D, device=dev, dtype=bf16)
        bt = torch.randn(B, 1, H, device=dev, dtype=bf16)

        def fla(L):
            return fused_recurrent_kda(
                q,
                k,
                v,
                gg,
                bt,
                A_log=L["A_log"],
                dt_bias=L["dt_bias"],
                scale=D**-0.5,
                initial_state=L["state"][1:],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=-5.0,
                state_v_first=True,
            )[0]

        fla(Ls[0])
        r["fla_recurrence_only_us"] = round(time_cores(fla), 3)
    except Exception as ex:  # noqa: BLE001 - as above
        r["fla_err"] = f"{type(ex).__name__}: {str(ex)[:300]}"
    return r


POOL_BYTES = 10_600_000_000
"""Of KV pages: 64 requests of 131,072 tokens have pages of their own."""


def mla_cell(S, d, B, context, pool):
    """FlashMLA and FA3-MLA over the same random pages: microseconds of the core (split and combine, schedules
    made before), and FA3's difference from FlashMLA."""
    H = d["H"]
    n = StockLayer(S, d["tp"], B)
    Ls = [make_attn_mla_small(d) for _ in range(max(2, min(48, 400_000_000 // (B * context * 1152))))]
    st = mla_state(d, B, context, pool, Ls)
    q = torch.randn(B, H, 576, device=dev, dtype=bf16)
    schedule = make_schedule(st["seqlens"], context, H)

    def flashmla(L):
        return n.flashmla(q.view(B, 1, H, 576), L, st)

    def fa3(L):
        return fa3_mla(q, pool, L["btab"], schedule, MLA_SCALE)

    def time_cores(call):
        return round(
            time_graph(capture(lambda: [call(L) for L in Ls], 1), len(Ls), min_ms=8, samples=9)["us"], 2
        )

    rel = relative_error(fa3(Ls[0]), flashmla(Ls[0]).view(B, H, 512))
    return {"flashmla_us": time_cores(flashmla), "fa3_us": time_cores(fa3), "rel_fa3": rel}


def in_line(first, second, *_):
    """Stands in for maybe_execute_in_parallel: both on the current stream."""
    return first(), second()


def one_stream_cell(S, d, B, Ls):
    """The composed KDA layer with every side-stream branch run in line: microseconds a layer."""
    st = common_state(B)
    for L in Ls:
        kda_state(d, B, L)
    n = StockLayer(S, d["tp"], B)
    n.aux = torch.cuda.current_stream()
    n.parallel = in_line

    def moe(h, L):
        logits, z = n.router(h, L), n.lin(h, L["dn_w"])
        sh = n.shared(h, L)
        tw, ti = n.topk(logits, L)
        return n.tail(n.experts(z, tw, ti, L), sh, L)

    n.moe = moe
    delta = torch.randn(B, HID, device=dev, dtype=bf16)

    def step():
        x = delta
        for L in Ls:
            x = n.layer("kda", L, st, x)
        return x

    stock_parallel = S.llg.maybe_execute_in_parallel
    S.llg.maybe_execute_in_parallel = in_line
    try:
        return round(time_graph(capture(step, 2), len(Ls), min_ms=60, before=st["reset"])["us"], 2)
    finally:
        S.llg.maybe_execute_in_parallel = stock_parallel


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    out = pathlib.Path(sys.argv[1])
    torch.manual_seed(2)
    S = StockKernels()
    print(S.ext, S.err, flush=True)
    results = {"ext": S.ext, "err": S.err}
    started = time.time()

    def run(section, key, cell, *arguments):
        try:
            value = cell(*arguments)
        except Exception as ex:  # noqa: BLE001 - one cell that fails must not hide the others; it is reported
            traceback.print_exc()
            value = {"err": f"{type(ex).__name__}: {str(ex)[:400]}"}
        results.setdefault(section, {})[key] = value
        print(section, key, value, f"t {time.time() - started:.1f}", flush=True)
        out.write_text(json.dumps(results))

    run("floors_us", "all", launch_floors)
    try:
        fi = load_flashinfer_kda()
    except Exception:  # noqa: BLE001 - stock and fla are still measured; each cell reports the missing peer
        traceback.print_exc()
        fi = None
    for tp in (8, 16):
        for B in BS:
            run("kda", f"tp{tp}.B{B}", kda_cell, S, fi, dims(tp), B)
    pool = torch.randn(POOL_BYTES // (PAGE * 1152), PAGE, 576, device=dev, dtype=bf16)
    for tp in (8, 16):
        for context in (1024, 32768, 131072):
            for B in BS:
                run("mla_core", f"tp{tp}.c{context}.B{B}", mla_cell, S, dims(tp), B, context, pool)
    del pool
    torch.cuda.empty_cache()
    for tp in (8, 16):
        d = dims(tp)
        Ls = [{**make_moe(d), **make_attn(d, "kda")} for _ in range(6)]
        for B in BS:
            run("kda_layer_one_stream_us", f"tp{tp}.B{B}", one_stream_cell, S, d, B, Ls)
        del Ls
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
