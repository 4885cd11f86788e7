"""Humming (vLLM 0.33.0's automatic MXFP4 MoE backend on SM90; the K3 Hopper recipe pins Marlin): the expert
chain, and the composed KDA+MoE and MLA+MoE layers with Humming in place of Marlin. W4A16, gemm type
"indexed".

    python3 -m k3_decode.peers.bench_humming OUT.json        README.md says how to unpack the peers first
"""

import json
import pathlib
import sys
import time
import traceback

import torch

from k3_decode.peers.bench_stock import random_routing, time_layers
from k3_decode.peers.stock_kernels import StockKernels
from k3_decode.peers.stock_layer import (
    BS,
    LAT,
    PAGE,
    TOPK,
    E,
    bf16,
    bytes_layer,
    dev,
    dims,
    i32,
    make_attn,
    make_moe,
)
from k3_decode.peers.timing import capture, is_finite, kernels_of, relative_error, time_graph

LAYERS = 8
POOL_BYTES = 6 * 2**30
SITU = (
    "[](float a, float b) { const float g = (4.0f) * tanhf(a / (4.0f)); "
    "const float s = g / (1.f + expf(-a)); "
    "const float u = (25.0f) * tanhf(b / (25.0f)); return s * u; }(a, b)"
)


class HummingExperts:
    """Humming's expert chain for the sizes `d` of `dims`, in the order of vLLM's HummingIndexedExperts.

    Building it transforms one set of random MXFP4 weights (about 12 s). `weights()` gives a layer's tensors
    in the transformed layout; `experts(z, tw, ti, L)` replaces StockLayer.experts.
    """

    def __init__(self, d):
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import (
            moe_fused_mul_sum,
        )

        self.d = d
        N = d["inter"]
        self.cfg, self.tune = {}, {}
        self.raw, self.layers = {}, {}
        for name, (n, k) in {"w13": (2 * N, LAT), "w2": (LAT, N)}.items():
            t0 = time.time()
            lay = HummingLayer(
                shape_n=n, shape_k=k, weight_config={"quant_method": "mxfp4"}, num_experts=E, torch_dtype=bf16
            ).to(dev)
            w = torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8, device=dev)
            lo = 117 if name == "w13" else 119
            s = torch.randint(lo, lo + 4, (E, n, k // 32), dtype=torch.uint8, device=dev)
            lay.load_from_tensors({"weight": w, "weight_scale": s})
            lay.transform()
            torch.cuda.synchronize()
            self.raw[name], self.layers[name], self.cfg[name] = (w, s), lay, lay.humming_config
            self.tune[name] = get_heuristics_config(
                layer_config=lay.humming_config,
                use_f16_accum=False,
                use_batch_invariant=False,
                gemm_type="indexed",
            )
            print(
                "humming",
                name,
                {p: (tuple(t.shape), str(t.dtype)) for p, t in lay.named_parameters()},
                f"{time.time() - t0:.1f} s",
                flush=True,
            )
        self.comp = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"})
        self.tstr = {k: json.dumps(v) for k, v in self.tune.items()}
        self.locks = torch.zeros(132 * 8, dtype=i32, device=dev)
        self.mul_sum = moe_fused_mul_sum

    def pick(self, name, m):
        for lo, hi, c in self.tune[name]:
            if lo < m <= hi:
                return c
        return None

    def weights(self):
        """Another layer's weights: random bits in the transformed layout."""
        o = {}
        for name in ("w13", "w2"):
            lay = self.layers[name]
            w = lay.weight
            o["h" + name] = (
                torch.randint(-(2**31), 2**31 - 1, w.shape, dtype=i32, device=dev).view(w.dtype)
                if w.dtype == i32
                else torch.randint(0, 256, w.shape, dtype=torch.uint8, device=dev).view(w.dtype)
            )
            s = lay.weight_scale.data
            o["hs" + name] = s.view(torch.uint8).roll(17, 0).view(s.dtype)
        return o

    def align(self, ti, bm):
        npad = ti.numel() + E * (bm - 1)
        if ti.numel() < E:
            npad = min(ti.numel() * bm, npad)
        sid = torch.empty(npad, dtype=i32, device=dev)
        eid = torch.empty(-(-npad // bm), dtype=i32, device=dev)
        npp = torch.empty(1, dtype=i32, device=dev)
        torch.ops._moe_C.moe_align_block_size(ti, E, bm, sid, eid, npp, None, None)
        return {"sorted_ids": sid, "expert_ids": eid, "num_tokens_padded": npp}

    def experts(self, z, tw, ti, L):
        """z [B, 3584], weights and ids [B, 16] -> weighted sum [B, 3584]."""
        from humming.forward import humming_forward, may_process_input

        B, N, K = z.shape[0], self.d["inter"], LAT
        m = ti.numel()
        bm1 = self.pick("w13", m)["block_shape"][0]
        bm2 = self.pick("w2", m)["block_shape"][0]
        al = self.align(ti, bm1)
        al2 = al if bm2 == bm1 else self.align(ti, bm2)
        gu = torch.empty(m, 2 * N, device=dev, dtype=bf16)
        humming_forward(
            self.cfg["w13"],
            inputs=z,
            weight=L["hw13"],
            weight_scale=L["hsw13"],
            outputs=gu,
            locks=self.locks,
            compute_config=self.comp,
            tuning_config=self.tstr["w13"],
            top_k=TOPK,
            valid_shape_m=m,
            weight_scale_2=getattr(self.layers["w13"], "weight_scale_2", None),
            **al,
        )
        act = torch.empty(m, N, device=dev, dtype=bf16)
        act, _, _ = may_process_input(
            self.cfg["w2"],
            inputs=gu,
            outputs=act,
            activation_type="binary_split",
            activation_impl=SITU,
            layout="normal",
        )
        dn = torch.empty(m, K, device=dev, dtype=bf16)
        humming_forward(
            self.cfg["w2"],
            inputs=act,
            weight=L["hw2"],
            weight_scale=L["hsw2"],
            outputs=dn,
            locks=self.locks,
            compute_config=self.comp,
            tuning_config=self.tstr["w2"],
            top_k=1,
            valid_shape_m=m,
            weight_scale_2=getattr(self.layers["w2"], "weight_scale_2", None),
            **al2,
        )
        out = torch.empty(B, K, device=dev, dtype=bf16)
        self.mul_sum(inputs=dn.view(B, TOPK, K), topk_weights=tw, topk_ids=ti, expert_map=None, outputs=out)
        return out

    def check(self):
        """Relative error of three tokens against the float64 dequantised product; needs `raw`."""
        N, B = self.d["inter"], 3
        mag = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=dev, dtype=torch.float64)
        val = torch.cat([mag, -mag])
        L = {
            "hw13": self.layers["w13"].weight,
            "hsw13": self.layers["w13"].weight_scale,
            "hw2": self.layers["w2"].weight,
            "hsw2": self.layers["w2"].weight_scale,
        }
        (ti,), tw, _ = random_routing(B, 1)
        z = torch.randn(B, LAT, device=dev, dtype=bf16)
        o = self.experts(z, tw, ti, L)

        def dequantised(name, e):
            w, s = (t[e] for t in self.raw[name])
            full = torch.stack([val[(w & 15).long()], val[(w >> 4).long()]], -1).view(w.shape[0], -1)
            return full * torch.exp2(s.double() - 127).repeat_interleave(32, 1)

        ref = torch.zeros(B, LAT, device=dev, dtype=torch.float64)
        for r in range(B):
            for j in range(TOPK):
                e = int(ti[r, j])
                h = (dequantised("w13", e) @ z[r].double()).to(bf16).double()
                a = (4 * torch.tanh(h[:N] / 4) * torch.sigmoid(h[:N])) * (25 * torch.tanh(h[N:] / 25))
                ref[r] += tw[r, j].double() * (dequantised("w2", e) @ a.to(bf16).double())
        return relative_error(o, ref)


def expert_cell(h, d, B, Ls):
    """The expert chain alone: 16 routings over the layers' weights."""
    ids, tw, distinct = random_routing(B, 16)
    z = torch.randn(B, LAT, device=dev, dtype=bf16)
    finite = is_finite(h.experts(z, tw, ids[0], Ls[0]))
    graph = capture(lambda: [h.experts(z, tw, i, Ls[j % len(Ls)]) for j, i in enumerate(ids)], 1)
    us = time_graph(graph, 16, min_ms=12, samples=9)["us"]
    by = bytes_layer(d, "kda", B, distinct)["experts"]
    return {
        "us": round(us, 2),
        "TBps": round(by / us / 1e6, 3),
        "finite": finite,
        "distinct": distinct,
        "kernels": kernels_of(graph, 16)["list"],
    }


def moe_without_marlin(d, h):
    L = make_moe(d)
    for k in ("w13", "w2", "s13", "s2"):
        L.pop(k)
    return {**L, **h.weights()}


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    out = pathlib.Path(sys.argv[1])
    torch.manual_seed(3)
    S = StockKernels()
    print(S.ext, S.err, flush=True)
    results = {"ext": S.ext, "err": S.err}
    started = time.time()
    failed = False
    for tp in (8, 16):
        d = dims(tp)
        h = HummingExperts(d)
        results[f"tp{tp}.check_rel"] = h.check()
        print(
            f"tp{tp} humming check",
            results[f"tp{tp}.check_rel"],
            f"t {time.time() - started:.1f}",
            flush=True,
        )
        results[f"tp{tp}.tune"] = {k: [[lo, hi, c] for lo, hi, c in v][:12] for k, v in h.tune.items()}
        h.raw = None
        torch.cuda.empty_cache()
        moes = [moe_without_marlin(d, h) for _ in range(LAYERS)]
        attn = {k: [make_attn(d, k) for _ in range(LAYERS)] for k in ("kda", "mla")}
        pool = torch.randn(POOL_BYTES // (PAGE * 1152), PAGE, 576, device=dev, dtype=bf16)
        for B in BS:
            r = {}
            try:
                r["experts"] = expert_cell(h, d, B, moes)
                for kind, ctx in (("kda", 0), ("mla", 1024), ("mla", 32768)):
                    Ls = [{**m, **a} for m, a in zip(moes, attn[kind], strict=True)]
                    cell = time_layers(S, d, B, kind, ctx, pool, Ls, experts=h.experts)
                    r[kind + (f".{ctx // 1024}k" if ctx else "")] = {
                        k: cell[k] for k in ("us", "kernels", "finite")
                    }
            except Exception as ex:  # noqa: BLE001 - one cell that fails must not hide the others; it is reported
                r["err"] = f"{type(ex).__name__}: {str(ex)[:400]}"
                failed = True
                traceback.print_exc(limit=6)
                torch.cuda.synchronize()
            results[f"tp{tp}.B{B}"] = r
            print(
                tp,
                B,
                {k: (v.get("us") if isinstance(v, dict) else v) for k, v in r.items()},
                f"t {time.time() - started:.1f}",
                flush=True,
            )
            out.write_text(json.dumps(results))
        del h, moes, attn, pool, Ls
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
