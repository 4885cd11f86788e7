"""What stock costs for one Kimi K3 decode layer of one rank on one H200, at TP8 and TP16 shapes.

    python3 -m k3_decode.peers.bench_stock --phase bw,jit,check,ops,layers --tp 8,16 --B 1,8,64 --out DIR

Phases: bw = read bandwidth, jit = first Marlin call, check = numerics against float64, ops = every op alone,
layers = the composed layers. Writes DIR/stock.json after each cell. README.md says how to unpack the peers
first. One module above 400 lines, because the list of ops of a layer is one table.
"""

import argparse
import json
import os
import pathlib
import time
import traceback

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from k3_decode.peers.check_stock import check_all
from k3_decode.peers.stock_kernels import StockKernels
from k3_decode.peers.stock_layer import (
    BS,
    EPS,
    HID,
    LAT,
    NBLK,
    PAGE,
    TOPK,
    D,
    E,
    StockLayer,
    bf16,
    bytes_layer,
    common_state,
    dev,
    dims,
    f32,
    i32,
    kda_state,
    make_attn,
    make_attn_mla_small,
    make_attn_small,
    make_moe,
    marlin_workspace,
    mla_state,
    random_weight,
)
from k3_decode.peers.timing import capture, is_finite, kernels_of, output_is_finite, time_graph

POOL_BYTES = 20 * 2**30
LAYER_KINDS = (("kda", 0), ("mla", 1024), ("mla", 32768), ("mla", 131072))


class Report:
    """Results of this run, on disk after every cell."""

    def __init__(self, path):
        self.path, self.data = pathlib.Path(path), {}

    def section(self, name):
        return self.data.setdefault(name, {})

    def save(self):
        self.path.write_text(json.dumps(self.data))


# ------------------------------------------------------------------ read bandwidth
@triton.jit
def _read_kernel(x, o, n, BLOCK: tl.constexpr, U: tl.constexpr):
    pid = tl.program_id(0)
    np_ = tl.num_programs(0)
    acc = tl.zeros((BLOCK,), tl.int32)
    for i in range(pid * U, n // BLOCK, np_ * U):
        for u in tl.static_range(U):
            j = (i + u).to(tl.int64) * BLOCK
            acc ^= tl.load(x + j + tl.arange(0, BLOCK), mask=(j + tl.arange(0, BLOCK)) < n, other=0)
    tl.store(o + pid, tl.xor_sum(acc, 0))


READ_FORMS = ((4096, 4, 2, 8), (8192, 2, 2, 8), (2048, 4, 4, 4), (4096, 2, 4, 8), (2048, 8, 4, 4))
"""Block, loads at a time, blocks a multiprocessor, warps."""


def read_rate(size_bytes):
    """Best read rate in GB/s of an xor-reduce over `size_bytes`."""
    x = torch.empty(size_bytes // 4, dtype=i32, device=dev).random_(-(2**31), 2**31 - 1)
    o = torch.empty(8192, dtype=i32, device=dev)

    def once(block, unroll, blocks, warps):
        def work():
            _read_kernel[(132 * blocks,)](x, o, x.numel(), BLOCK=block, U=unroll, num_warps=warps)

        return time_graph(capture(work, 1), 1, samples=9)["us"]

    return size_bytes / min(once(*form) for form in READ_FORMS) / 1e3


def phase_bandwidth(report):
    """Best read rate of an xor-reduce over 8.6 GB, 300, 200 and 100 MB, and of a copy node (a copy-engine
    transfer)."""
    x = torch.randint(-(2**31), 2**31 - 1, (2**31,), dtype=i32, device=dev)  # 8 GiB
    o = torch.empty(8192, dtype=i32, device=dev)
    found = report.section("bw")

    def read_once(size, nset, blk, u, mult, w):
        def work():
            for s in range(nset):
                _read_kernel[(132 * mult,)](x[s * size :], o, size, BLOCK=blk, U=u, num_warps=w)

        return time_graph(capture(work, 1), nset, samples=9)["us"]

    for size in (2**31, 300_000_000 // 4, 200_000_000 // 4, 100_000_000 // 4):
        nset = min(2**31 // size, 16)
        us, config = min((read_once(size, nset, *c), c) for c in READ_FORMS)
        found[str(size * 4)] = {"TBps": size * 4 / us / 1e6, "us": us, "cfg": config}
        print("read", size * 4, found[str(size * 4)], flush=True)
    y = torch.empty_like(x[: 2**30])
    us = time_graph(capture(lambda: y.copy_(x[: 2**30]), 1), 1, samples=9)["us"]
    found["copy"] = {"TBps": 2 * 2**32 / us / 1e6}
    print("copy", found["copy"], flush=True)


# ------------------------------------------------------------------ first Marlin call
def phase_jit(S, report, tps):
    """First use of each Marlin kernel: the wheel has no sm_90 cubin for it, so the driver compiles its
    PTX."""
    for tp in tps:
        d = dims(tp)
        n, N, B = 32, d["inter"], 2
        z = torch.randn(B, LAT, device=dev, dtype=bf16)
        w13 = torch.randint(-(2**31), 2**31 - 1, (n, LAT // 16, 4 * N), dtype=i32, device=dev)
        s13 = torch.full((n, LAT // 32, 2 * N), 119, dtype=torch.uint8, device=dev).view(torch.float8_e8m0fnu)
        ti = torch.randperm(n, device=dev)[:TOPK].to(i32).repeat(B, 1).contiguous()
        tw = torch.full((B, TOPK), 1 / 16, device=dev)
        sid = torch.empty(B * TOPK * 8, dtype=i32, device=dev)
        eid = torch.empty(B * TOPK, dtype=i32, device=dev)
        npp = torch.empty(1, dtype=i32, device=dev)
        torch.ops._moe_C.moe_align_block_size(ti, n, 8, sid, eid, npp, None, None)
        c = torch.empty(B * TOPK, 2 * N, device=dev, dtype=bf16)
        started = time.time()
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            z,
            c,
            w13,
            None,
            s13,
            None,
            None,
            None,
            marlin_workspace(),
            sid,
            eid,
            npp,
            tw,
            8,
            TOPK,
            False,
            S.fp4_id,
            B,
            2 * N,
            LAT,
            False,
            True,
            False,
            -1,
            -1,
            -1,
        )
        torch.cuda.synchronize()
        report.section("jit_s")[str(tp)] = time.time() - started
        print(f"marlin first call tp{tp}: {time.time() - started:.1f} s finite {is_finite(c)}", flush=True)


# ------------------------------------------------------------------ single ops
class WeightSets:
    """Rotating sets of one weight: at least 400 MB in all where the weight allows it, made once per shape."""

    def __init__(self):
        self.made = {}

    def __call__(self, n, k, most=400):
        if (n, k) not in self.made:
            count = max(6, min(most, int(400e6 / (2 * n * k)) + 1))
            self.made[n, k] = [random_weight(n, k) for _ in range(count)]
        return self.made[n, k]


def phase_ops(S, report, tps, Bs):
    """Every op alone: one graph of back-to-back calls over rotating weights."""
    for tp in tps:
        d = dims(tp)
        Lm, weights = make_moe(d), WeightSets()
        pool = torch.randn(POOL_BYTES // (PAGE * 1152), PAGE, 576, device=dev, dtype=bf16)
        for B in Bs:
            out = ops_of_cell(S, d, B, Lm, weights, pool)
            report.section("ops")[f"tp{tp}.B{B}"] = out
            print(
                f"ops tp{tp} B{B} " + " ".join(f"{k}={v.get('us', 'ERR')}" for k, v in out.items()),
                flush=True,
            )
            report.save()
        del pool, Lm, weights
        torch.cuda.empty_cache()


def ops_of_cell(S, d, B, Lm, weights, pool):
    n = StockLayer(S, d["tp"], B)
    st = common_state(B)
    out = {}

    def go(name, calls, nbytes):
        try:
            if not output_is_finite(calls[0]):
                out[name] = {"err": "non-finite output"}
                print("NONFINITE", d["tp"], B, name, flush=True)
                return
            t = time_graph(
                capture(lambda: [call() for call in calls], 1),
                len(calls),
                min_ms=12,
                samples=9,
                before=st["reset"],
            )
            out[name] = {"us": round(t["us"], 3), "TBps": round(nbytes / t["us"] / 1e6, 3), "n": len(calls)}
        except Exception as ex:  # noqa: BLE001 - one peer that fails must not hide the others; it is reported
            out[name] = {"err": f"{type(ex).__name__}: {str(ex)[:300]}"}
            print("ERR", d["tp"], B, name, out[name]["err"], flush=True)
            torch.cuda.synchronize()

    time_linears(n, d, weights, go)
    time_kda_core(n, d, st, go)
    time_attn_res(n, go)
    time_routing(n, Lm, weights, go)
    time_experts(n, d, Lm, weights, go, out)
    time_mla(n, d, pool, go)
    return out


def time_linears(n, d, weights, go):
    B, H, P = n.B, d["H"], d["P"]

    def gemm(name, N_, K_, lin=True):
        x = torch.randn(B, K_, device=dev, dtype=bf16)
        ws = weights(N_, K_)
        by = 2 * N_ * K_
        go(name + ".cublas", [lambda w=w: F.linear(x, w) for w in ws], by)
        if lin and n.plans.get((N_, K_), {}).get(B):
            go(name + "." + n.plans[N_, K_][B][0], [lambda w=w: n.lin(x, w) for w in ws], by)

    gemm("in_proj", d["n_in"], HID)
    gemm("f_b", P, D)
    gemm("o_proj", HID, P)
    gemm("latent_down", LAT, HID)
    gemm("shared_gate_up", 2 * d["sh"], HID)
    gemm("shared_down", HID, d["sh"])
    gemm("mla_qkv_a", 2112, HID)
    gemm("mla_gate", P, HID)
    gemm("mla_qkv_a_g", 2112 + P, HID)
    gemm("mla_q_b", H * 192, 1536)
    gemm("latent_up", HID, LAT, lin=False)
    if n.tp == 8 and B <= 14:
        h = torch.randn(B, HID, device=dev, dtype=bf16)
        La = [{"in_w": w, "fb_w": f} for w, f in zip(weights(d["n_in"], HID), weights(P, D), strict=False)]
        go("kda_proj.overlap", [lambda L=L: n.kda_proj(h, L) for L in La], 2 * (d["n_in"] * HID + P * D))


def time_kda_core(n, d, st, go):
    B, H, P = n.B, d["H"], d["P"]
    Lk = [make_attn_small(d) for _ in range(max(4, min(160, int(250e6 / (B * H * 65536)) + 1)))]
    for L in Lk:
        kda_state(d, B, L)
    p = torch.randn(B, d["n_in"], device=dev, dtype=bf16)
    mixed, g, _, beta = p.split([3 * P, P, D, H] + ([d["pad"]] if d["pad"] else []), dim=-1)[:4]
    g1 = torch.randn(B, P, device=dev, dtype=bf16)
    by = B * (2 * 4 * H * D * D + 2 * 2 * 3 * 3 * P)
    if H == 12:
        go("kda_core.native", [lambda L=L: n.kda_core(mixed, g, g1, beta, L, st) for L in Lk], by)
    go("kda_core.triton", [lambda L=L: n.kda_core(mixed, g, g1, beta, L, st, True) for L in Lk], by)


def time_attn_res(n, go):
    states = [common_state(n.B) for _ in range(24)]
    L = {
        "ar1": (
            torch.rand(HID, device=dev, dtype=bf16) + 0.5,
            torch.randn(HID, device=dev, dtype=bf16) * 0.02,
            torch.rand(HID, device=dev, dtype=bf16) + 0.5,
        )
    }
    delta = torch.randn(n.B, HID, device=dev, dtype=bf16) * 1e-2
    go("attn_res", [lambda s=s: n.attn_res(s, delta, L, "ar1") for s in states], n.B * HID * 2 * (NBLK + 4))


def time_routing(n, Lm, weights, go):
    B = n.B
    h = torch.randn(B, HID, device=dev, dtype=bf16)
    ws = weights(E, HID)
    if B <= 16 and n.plans:
        go("router.cute", [lambda w=w: n.router(h, {"r_w": w}) for w in ws], 2 * E * HID)
    go("router.cublas_f32out", [lambda w=w: torch.mm(h, w.t(), out_dtype=f32) for w in ws], 2 * E * HID)
    logits = [torch.randn(B, E, device=dev) for _ in range(16)]
    go("grouped_topk", [lambda x=x: n.topk(x, Lm) for x in logits], B * E * 4)

    def topk_in_torch(x):
        s = x.sigmoid()
        w = s.gather(1, (s + Lm["r_bias"]).topk(TOPK, -1).indices)
        return w / w.sum(-1, True)

    go("topk.torch", [lambda x=x: topk_in_torch(x) for x in logits], B * E * 4)


def random_routing(B, count):
    """`count` uniform routings: ids [B, 16] int32 each, one set of weights [B, 16], and the mean number of
    distinct experts."""
    ids = [
        torch.stack([torch.randperm(E, device=dev)[:TOPK] for _ in range(B)]).to(i32) for _ in range(count)
    ]
    tw = torch.rand(B, TOPK, device=dev)
    tw /= tw.sum(-1, True)
    return ids, tw, sum(int(i.unique().numel()) for i in ids) / count


def time_experts(n, d, Lm, weights, go, out):
    B, N = n.B, d["inter"]
    ids, tw, distinct = random_routing(B, 16)
    z = torch.randn(B, LAT, device=dev, dtype=bf16)
    calls = [lambda i=i: n.experts(z, tw, i, Lm) for i in ids]
    go("experts.marlin_chain", calls, bytes_layer(d, "kda", B, distinct)["experts"])
    out["experts.marlin_chain"]["distinct"] = distinct
    if "us" in out["experts.marlin_chain"]:
        graph = capture(lambda: [call() for call in calls], 1)
        out["experts.marlin_chain"]["kernels"] = kernels_of(graph, len(calls))["list"]
        del graph
    h = torch.randn(B, HID, device=dev, dtype=bf16)
    pairs = zip(weights(2 * d["sh"], HID), weights(HID, d["sh"]), strict=False)
    go(
        "shared.chain",
        [lambda a=a, b=b: n.shared(h, {"sgu_w": a, "sd_w": b}) for a, b in pairs],
        6 * d["sh"] * HID,
    )
    r, sh = torch.randn(B, LAT, device=dev, dtype=bf16), torch.randn(B, HID, device=dev, dtype=bf16)
    go(
        "tail.norm_up_add",
        [lambda w=w: n.tail(r, sh, {"ln": Lm["ln"], "up_w": w}) for w in weights(HID, LAT)],
        2 * HID * LAT,
    )
    rn = torch.empty_like(r)

    def rms():
        torch.ops._C.rms_norm(rn, r, Lm["ln"], EPS)
        return rn

    go("latent_rms_norm", [rms] * 16, B * LAT * 4)
    sx = torch.randn(B * TOPK, 2 * N, device=dev, dtype=bf16)
    so = torch.empty(B * TOPK, N, device=dev, dtype=bf16)

    def situ():
        torch.ops._C.situ_and_mul(so, sx, 4.0, 25.0)
        return so

    go("situ.experts", [situ] * 16, B * TOPK * N * 6)


def time_mla(n, d, pool, go):
    B, H, P = n.B, d["H"], d["P"]
    Lw = [make_attn_mla_small(d) for _ in range(80)]
    q = torch.randn(B, H, 192, device=dev, dtype=bf16)
    go(
        "mla_w_uk",
        [lambda L=L: torch.bmm(q[..., :128].transpose(0, 1), L["W_UK_T"]) for L in Lw],
        2 * H * 128 * 512,
    )
    lat = torch.randn(B, 1, H, 512, device=dev, dtype=bf16)
    vo = torch.empty(B, P, device=dev, dtype=bf16)
    go(
        "mla_w_uv",
        [
            lambda L=L: torch.bmm(
                lat.view(-1, H, 512).transpose(0, 1), L["W_UV"], out=vo.view(B, H, D).transpose(0, 1)
            )
            for L in Lw
        ],
        2 * H * 128 * 512,
    )
    for ctx in (1024, 32768, 131072):
        time_flashmla(n, d, pool, ctx, q, go)
    qc = torch.randn(B, 2112, device=dev, dtype=bf16)
    Lq = make_attn(d, "mla")
    normed = (torch.empty(B, 1536, device=dev, dtype=bf16), torch.empty(B, 512, device=dev, dtype=bf16))
    a, b, _ = qc.split([1536, 512, 64], -1)
    go("mla_q_kv_norm", [lambda: n.q_kv_norm(a, b, Lq, normed)[0]] * 16, B * 2048 * 4)
    vo.normal_()
    gate, gated = torch.randn_like(vo), torch.empty_like(vo)
    go("mla_gate_mul", [lambda: n.gate_mul(vo, gate, gated)] * 16, B * P * 6)


def time_flashmla(n, d, pool, ctx, q, go):
    B, H = n.B, d["H"]
    Ls = [{} for _ in range(8 if ctx < 100000 else 4)]
    try:
        ms = mla_state(d, B, ctx, pool, Ls)
    except Exception as ex:  # noqa: BLE001 - a context that does not fit is reported and skipped
        print("flashmla", B, ctx, str(ex)[:300], flush=True)
        return
    mq = torch.randn(B, 1, H, 576, device=dev, dtype=bf16)
    go(f"flashmla.{ctx // 1024}k", [lambda L=L: n.flashmla(mq, L, ms) for L in Ls], B * ctx * 1152)
    if ctx == 1024:
        ql = torch.randn(B, H, 512, device=dev, dtype=bf16)
        mo = torch.empty(B, H, 576, device=dev, dtype=bf16)
        kc, kp = torch.randn(B, 512, device=dev, dtype=bf16), torch.randn(B, 64, device=dev, dtype=bf16)
        go(
            "mla_concat_insert",
            [lambda L=L: n.concat_insert(ql, q[..., 128:], kc, kp, pool, L, mo) for L in Ls * 2],
            B * H * 576 * 4,
        )
        go(
            "flashmla.metadata+1k",
            [lambda L=L: n.flashmla(mq, L, ms, scheduled=False) for L in Ls],
            B * ctx * 1152,
        )


# ------------------------------------------------------------------ composed layers
def phase_layers(S, report, tps, Bs, NL=8):
    """NL distinct layers in one graph, every kind and context."""
    for tp in tps:
        d = dims(tp)
        started = time.time()
        moes = [make_moe(d) for _ in range(NL)]
        attn = {k: [make_attn(d, k) for _ in range(NL)] for k in ("kda", "mla")}
        pool = torch.randn(POOL_BYTES // (PAGE * 1152), PAGE, 576, device=dev, dtype=bf16)
        torch.cuda.synchronize()
        print(
            f"tp{tp} weights {torch.cuda.memory_allocated() / 1e9:.1f} GB in {time.time() - started:.1f} s",
            flush=True,
        )
        for B in Bs:
            for kind, ctx in LAYER_KINDS:
                key = f"tp{tp}.B{B}.{kind}" + (f".{ctx // 1024}k" if ctx else "")
                Ls = [{**m, **a} for m, a in zip(moes, attn[kind], strict=True)]
                try:
                    report.section("layers")[key] = time_layers(S, d, B, kind, ctx, pool, Ls)
                    shown = {k: v for k, v in report.section("layers")[key].items() if k != "list"}
                    print(key, json.dumps(shown), flush=True)
                except Exception as ex:  # noqa: BLE001 - one cell that fails must not hide the others; it is reported
                    report.section("layers")[key] = {"err": f"{type(ex).__name__}: {str(ex)[:400]}"}
                    traceback.print_exc(limit=4)
                    torch.cuda.synchronize()
                report.save()
        del moes, attn, pool, Ls
        torch.cuda.empty_cache()


def time_layers(S, d, B, kind, ctx, pool, Ls, experts=None):
    """The composed layers of one cell, as one graph: times, kernel counts, bytes, finiteness.

    Ls holds one dictionary of weights per layer; `experts(z, weights, ids, L)` replaces the Marlin chain.
    """
    NL = len(Ls)
    n = StockLayer(S, d["tp"], B)
    if experts is not None:
        n.experts = experts
    st = common_state(B)
    if kind == "kda":
        for L in Ls:
            kda_state(d, B, L)
    else:
        st.update(mla_state(d, B, ctx, pool, Ls))
    delta = torch.randn(B, HID, device=dev, dtype=bf16)
    st["reset"]()
    distinct, finite, x = 0.0, True, delta
    for L in Ls:
        x = n.layer(kind, L, st, x)
        distinct += int(n.last_ids.unique().numel()) / NL
        finite = finite and is_finite(x)

    def step():
        x = delta
        for L in Ls:
            x = n.layer(kind, L, st, x)
        return x

    graph = capture(step, 1)
    t = time_graph(graph, NL, min_ms=60, samples=15, before=st["reset"])
    k = kernels_of(graph, NL)
    by = bytes_layer(d, kind, B, distinct, ctx)
    return {
        "us": round(t["us"], 2),
        "min": round(t["min"], 2),
        "p90": round(t["p90"], 2),
        "kernels": k["kernels"],
        "memops": k["memops"],
        "kernel_sum_us": round(k["sum_us"], 2),
        "distinct": distinct,
        "MB_stock": round(by["stock"] / 1e6, 1),
        "MB_ideal": round(by["ideal"] / 1e6, 1),
        "TBps": round(by["stock"] / t["us"] / 1e6, 3),
        "finite": finite and is_finite(st["prefix"]),
        "list": k["list"][:30],
    }


def integers(text):
    return [int(word) for word in text.split(",")]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", default="bw,jit,check")
    parser.add_argument("--tp", default=[8, 16], type=integers)
    parser.add_argument("--B", default=BS, type=integers)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--name", default="stock.json")
    parser.add_argument("--nl", type=int, default=8, help="distinct layers in one graph")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    started = time.time()
    report = Report(pathlib.Path(arguments.out) / arguments.name)
    S = StockKernels()
    report.data.update(
        torch=torch.__version__,
        triton=triton.__version__,
        cuda=torch.version.cuda,
        gpu=torch.cuda.get_device_name(0),
        when=time.strftime("%F %T"),
        ext=S.ext,
        err=S.err,
        cutlass=getattr(S, "cutlass_version", None),
    )
    print(report.data, flush=True)
    phases = {
        "bw": lambda: phase_bandwidth(report),
        "jit": lambda: phase_jit(S, report, arguments.tp),
        "check": lambda: report.section("check").update(check_all(S, arguments.tp)),
        "ops": lambda: phase_ops(S, report, arguments.tp, arguments.B),
        "layers": lambda: phase_layers(S, report, arguments.tp, arguments.B, arguments.nl),
    }
    failed = False
    for phase in arguments.phase.split(","):
        phase_started = time.time()
        try:
            phases[phase]()
        except Exception:  # noqa: BLE001 - the next phase still runs; the exit code tells
            traceback.print_exc()
            failed = True
        report.section("phase_s")[phase] = time.time() - phase_started
        print(
            f"== phase {phase} {time.time() - phase_started:.1f} s, total {time.time() - started:.1f} s",
            flush=True,
        )
        report.save()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
