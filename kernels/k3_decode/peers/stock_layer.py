"""One Kimi K3 decode layer of one rank, composed of the stock kernels as vLLM 0.33.0 composes it on SM90.

`StockLayer(kernels, tp, B)` has one method per stock op and `layer()` for the whole sequence AttnRes ->
attention -> o_proj -> AttnRes -> router, experts, shared expert -> tail; collectives are left out. Weights
and states are plain dictionaries made by `make_moe`, `make_attn`, `kda_state` and `mla_state`, so that a
kernel of your own can be given the same tensors. Everything is graph-capturable: call each method once before
capture. One module above 400 lines, because an op and its weights are read together.
"""

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from k3_decode.peers.stock_kernels import maybe_execute_in_parallel

bf16, f32, i32, dev = torch.bfloat16, torch.float32, torch.int32, "cuda"
HID, LAT, E, TOPK, D = 7168, 3584, 896, 16, 128
EPS = 1e-5
BS = [1, 2, 4, 8, 16, 32, 64]
NBLK = 4  # AttnRes: 4 finished blocks + prefix = 5 sources
MLA_SCALE = 192**-0.5
PAGE = 64


def dims(tp):
    """Per-rank sizes: heads H, H*D P, in_proj rows n_in (pad of them padding), expert width, shared-expert
    width sh."""
    H = 96 // tp
    P = H * D
    n_in = 4 * P + D + H
    pad = -n_in % 16
    inter = max(3072 // tp, 256)  # vLLM pads the expert intermediate to >= 256 per rank
    return {"tp": tp, "H": H, "P": P, "n_in": n_in + pad, "pad": pad, "inter": inter, "sh": 6144 // tp}


@cache
def aux_stream():
    """vLLM's one side stream per process."""
    return torch.cuda.Stream()


@cache
def marlin_workspace():
    return torch.zeros(132 * 4, dtype=i32, device=dev)


def random_weight(n, k, scale=None):
    """[n, k] bf16, scaled so that products keep unit variance."""
    return torch.randn(n, k, device=dev, dtype=bf16) * (scale or k**-0.5)


@triton.jit
def _gate_mul(a, g, o, n, P: tl.constexpr, sg, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    r = i // P
    gg = tl.load(g + r * sg + i % P, mask=m).to(tl.float32)
    tl.store(o + i, (tl.load(a + i, mask=m).to(tl.float32) * tl.sigmoid(gg)).to(tl.bfloat16), mask=m)


class StockLayer:
    """The stock ops of one rank at TP `tp` (8 or 16) and `B` tokens; `S` is a StockKernels. Shapes: H, P,
    n_in, inter, sh of `dims`.

    L holds one layer's weights and states, st what all layers of a step share. bf16 unless said.
    """

    def __init__(self, S, tp, B):
        self.S, self.B = S, B
        self.__dict__.update(dims(tp))
        self.aux = aux_stream()
        self.parallel = maybe_execute_in_parallel  # assign another function to run without side streams
        self.ev = [torch.cuda.Event() for _ in range(12)]
        self.ws = marlin_workspace()
        tab = S.llg._low_latency_table() if S.llg is not None and S.have_cute else None
        self.plans = {k: S.llg._build_plan(v) for k, v in tab.items()} if tab else {}

    def lin(self, x, w):
        """x [B, k] times w [n, k] transposed -> [B, n], as vLLM picks: its measured SM90 table, else
        cuBLAS."""
        plan = self.plans.get((w.shape[0], w.shape[1]))
        if plan is not None and self.S.llg._runtime_ok(x, w):
            o = self.S.llg._run_plan(plan, x, w)
            if o is not None:
                return o
        return F.linear(x, w)

    def attn_res(self, st, delta, L, which):
        """delta [B, 7168] -> normalised mix of 4 blocks and the prefix [B, 7168]; adds delta to
        st["prefix"]. which: "ar1" or "ar2"."""
        nw, qw, on = L[which]
        return self.S.attn_res(
            st["prefix"],
            delta,
            st["blocks"],
            nw,
            qw,
            on,
            num_blocks=NBLK,
            block_write_idx=-1,
            eps=EPS,
            output_norm_eps=EPS,
        )

    def kda_proj(self, h, L):
        """h [B, 7168] -> mixed q, k, v [B, 3P], output gate [B, P], decay g1 [B, P], beta [B, H] (views of
        one product)."""
        P, H = self.P, self.H
        if self.tp == 8 and self.B <= 14 and self.plans:
            qkvg, g1, beta = self.S.llg.run_kda_projection_overlap(
                h, L["in_w"], L["fb_w"], self.aux, (self.ev[0], self.ev[1])
            )
            mixed, g = qkvg.split([3 * P, P], dim=-1)
        else:
            p = self.lin(h, L["in_w"])
            sp = [3 * P, P, D, H] + ([self.pad] if self.pad else [])
            mixed, g, fa, beta = p.split(sp, dim=-1)[:4]
            g1 = self.lin(fa, L["fb_w"])
        return mixed, g, g1, beta

    def kda_core(self, mixed, g, g1, beta, L, st, force_triton=False):
        """Conv update, gates, delta rule, norm and output gate -> [B, P]; updates L["state"] (fp32) and
        L["conv_state"] by slot."""
        B, H, P = self.B, self.H, self.P
        g1 = g1.view(1, B, H, D)
        beta = beta.unsqueeze(0)
        g2 = g.unflatten(-1, (H, D))
        conv = L["conv_state"].transpose(-1, -2)
        out = torch.empty(1, B, H, D, device=dev, dtype=bf16)
        if H in (12, 24, 48, 96) and not force_triton:
            torch.ops._C.fused_kda_decode(
                mixed,
                L["conv_wm"],
                None,
                conv,
                g1,
                beta,
                L["A_log"],
                L["dt_bias"],
                st["slots"],
                L["state"],
                out,
                -5.0,
                g2,
                L["onorm_f"],
                EPS,
            )
        else:  # the Triton fallback of vLLM: conv update, packed recurrence, copy, gated norm in place
            y = self.S.conv_update(
                mixed,
                conv,
                L["conv_w"],
                None,
                activation="silu",
                conv_state_indices=st["slots"],
                validate_data=True,
                out=torch.empty_like(mixed),
            )
            o, _ = self.S.packed_decode(
                mixed_qkv=y,
                raw_g=g1,
                raw_beta=beta,
                A_log=L["A_log"],
                dt_bias=L["dt_bias"],
                lower_bound=-5.0,
                initial_state=L["state"],
                state_indices=st["slots"],
                out=None,
            )
            out[0, :B] = o[0, :B]
            out.copy_(self.S.norm_gated(out, g2, L["onorm"], None, "sigmoid", eps=EPS))
        return out.view(B, P)

    def q_kv_norm(self, qc, kv, L, out=None):
        """RMSNorm of qc [B, 1536] and kv [B, 512] (views with a row stride) in one kernel -> the same
        shapes, compact."""
        B = self.B
        qo, ko = out or (
            torch.empty(B, 1536, device=dev, dtype=bf16),
            torch.empty(B, 512, device=dev, dtype=bf16),
        )
        self.S.qkv_norm_kernel[(B, 2)](
            qc,
            qo,
            L["qn"],
            qc.stride(0),
            qo.stride(0),
            kv,
            ko,
            L["kvn"],
            kv.stride(0),
            ko.stride(0),
            EPS,
            Q_SIZE=1536,
            KV_SIZE=512,
            BLOCK_SIZE=2048,
            launch_pdl=True,
            num_warps=8,
        )
        return qo, ko

    def concat_insert(self, ql, qp, ko, kpe, kv, L, out=None):
        """ql [B, H, 512] and qp [B, H, 64] side by side -> [B, H, 576]; ko [B, 512] and kpe [B, 64] into
        the KV pages."""
        mq = torch.empty(self.B, self.H, 576, device=dev, dtype=bf16) if out is None else out
        torch.ops._C.fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(
            ql, qp, ko, kpe, mq, kv, L["slotmap"], PAGE, None, None
        )
        return mq

    def flashmla(self, mq, L, st, scheduled=True):
        """mq [B, 1, H, 576] over the paged KV -> [B, 1, H, 512]; `scheduled=False` runs the tile scheduler
        as well."""
        return torch.ops._flashmla_C.dense_decode_fwd(
            mq,
            st["kv"].unsqueeze(-2),
            512,
            st["seqlens"],
            L["btab"],
            MLA_SCALE,
            True,
            st["md"] if scheduled else None,
            st["ns"] if scheduled else None,
            None,
        )[0]

    def gate_mul(self, a, gate, out=None):
        """a [B, P] * sigmoid(gate [B, P], a view with a row stride) -> [B, P]."""
        o = torch.empty_like(a) if out is None else out
        n = a.numel()
        _gate_mul[(triton.cdiv(n, 1024),)](a, gate, o, n, self.P, gate.stride(0), BLOCK=1024)
        return o

    def mla_attn(self, h, L, st):
        """h [B, 7168] -> gated attention output [B, P]; inserts this token's KV row. The gate GEMM runs on
        the side stream."""
        B, H, P = self.B, self.H, self.P

        def main():
            c = self.lin(h, L["a_w"][:2112])
            qc, kv, kpe = c.split([1536, 512, 64], dim=-1)
            qo, ko = self.q_kv_norm(qc, kv, L)
            q = self.lin(qo, L["qb_w"]).view(B, H, 192)
            qn, qp = q.split([128, 64], dim=-1)
            ql = torch.bmm(qn.transpose(0, 1), L["W_UK_T"]).transpose(0, 1)
            mq = self.concat_insert(ql, qp, ko, kpe, st["kv"], L)
            o = self.flashmla(mq.view(B, 1, H, 576), L, st)
            out = torch.empty(B, P, device=dev, dtype=bf16)
            torch.bmm(o.view(-1, H, 512).transpose(0, 1), L["W_UV"], out=out.view(B, H, D).transpose(0, 1))
            return out

        out, gate = self.parallel(
            main, lambda: self.lin(h, L["a_w"][2112:]), self.ev[2], self.ev[3], self.aux
        )
        return self.gate_mul(out, gate)

    def router(self, h, L):
        """h [B, 7168] -> fp32 logits [B, 896]."""
        if self.B <= 16 and self.plans and self.S.ll_router is not None:
            return self.S.ll_router(h, L["r_w"])
        return torch.mm(h, L["r_w"].t(), out_dtype=f32)

    def topk(self, logits, L):
        """logits [B, 896] -> renormalised weights [B, 16] fp32, expert ids [B, 16] int32."""
        return torch.ops._moe_C.grouped_topk(logits, 1, 1, TOPK, True, 1.0, L["r_bias"], 1)

    def experts(self, z, tw, ti, L):
        """Marlin W4A16 chain: z [B, 3584], weights and ids [B, 16] -> weighted sum [B, 3584]."""
        B, N = self.B, self.inter
        bm = 8
        for bm in (8, 16, 32, 48, 64):
            if B * TOPK / E / bm < 0.9:
                break
        npad = ti.numel() + E * (bm - 1)
        if ti.numel() < E:
            npad = min(ti.numel() * bm, npad)
        sid = torch.empty(npad, dtype=i32, device=dev)
        eid = torch.empty(triton.cdiv(npad, bm), dtype=i32, device=dev)
        npp = torch.empty(1, dtype=i32, device=dev)
        torch.ops._moe_C.moe_align_block_size(ti, E, bm, sid, eid, npp, None, None)
        c13 = torch.empty(B * TOPK * max(2 * N, LAT), device=dev, dtype=bf16)
        c2 = torch.empty(B * TOPK, N, device=dev, dtype=bf16)
        mm = torch.ops._moe_C.moe_wna16_marlin_gemm
        c1 = mm(
            z,
            c13[: B * TOPK * 2 * N].view(B * TOPK, 2 * N),
            L["w13"],
            None,
            L["s13"],
            None,
            None,
            None,
            self.ws,
            sid,
            eid,
            npp,
            tw,
            bm,
            TOPK,
            False,
            self.S.fp4_id,
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
        torch.ops._C.situ_and_mul(c2, c1.view(-1, 2 * N), 4.0, 25.0)
        c3 = mm(
            c2,
            c13[: B * TOPK * LAT].view(B * TOPK, LAT),
            L["w2"],
            None,
            L["s2"],
            None,
            None,
            None,
            self.ws,
            sid,
            eid,
            npp,
            tw,
            bm,
            1,
            True,
            self.S.fp4_id,
            B * TOPK,
            LAT,
            N,
            False,
            True,
            False,
            -1,
            -1,
            -1,
        )
        r = torch.empty(B, LAT, device=dev, dtype=bf16)
        torch.ops._moe_C.moe_sum(c3.view(B, TOPK, LAT), r, None, None)
        return r

    def shared(self, h, L):
        """Shared expert: h [B, 7168] -> [B, 7168]."""
        gu = self.lin(h, L["sgu_w"])
        a = torch.empty(self.B, self.sh, device=dev, dtype=bf16)
        torch.ops._C.situ_and_mul(a, gu, 4.0, 25.0)
        return self.lin(a, L["sd_w"])

    def tail(self, r, sh, L):
        """Latent RMSNorm, up projection and shared add: r [B, 3584], sh [B, 7168] -> [B, 7168]."""
        rn = torch.empty_like(r)
        torch.ops._C.rms_norm(rn, r, L["ln"], EPS)
        res = torch.mm(rn, L["up_w"].t())
        res.add_(sh)
        return res

    def moe(self, h, L):
        """h [B, 7168] -> [B, 7168]; keeps the routing in last_ids."""
        ev = self.ev
        logits, z = self.parallel(
            lambda: self.router(h, L), lambda: self.lin(h, L["dn_w"]), ev[4], ev[5], self.aux
        )
        ev[6].record()
        with torch.cuda.stream(
            aux_stream()
        ):  # one process-wide side stream for router/down and shared experts, as in vLLM
            ev[6].wait()
            sh = self.shared(h, L)
            ev[7].record()
        tw, ti = self.topk(logits, L)
        self.last_ids = ti
        r = self.experts(z, tw, ti, L)
        ev[7].wait()
        # here: all-reduce(latent), all-reduce(shared) on the aux stream (left out)
        return self.tail(r, sh, L)

    def layer(self, kind, L, st, delta):
        """One layer, kind "kda" or "mla": delta [B, 7168] -> the next layer's delta [B, 7168]."""
        h = self.attn_res(st, delta, L, "ar1")
        if kind == "kda":
            a = self.kda_core(*self.kda_proj(h, L), L, st)
        else:
            a = self.mla_attn(h, L, st)
        a = self.lin(a, L["o_w"])
        # here: all-reduce [B,7168] (left out)
        h2 = self.attn_res(st, a, L, "ar2")
        return self.moe(h2, L)


def _random_int32(*shape):
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=i32, device=dev)


def make_moe(d):
    """Random weights of one MoE block; w13, w2 are random bits in Marlin's packed layout with sane scales."""
    N = d["inter"]
    L = {}
    L["r_w"], L["r_bias"] = random_weight(E, HID), torch.randn(E, device=dev) * 0.01
    L["dn_w"], L["up_w"] = random_weight(LAT, HID), random_weight(HID, LAT)
    L["sgu_w"], L["sd_w"] = random_weight(2 * d["sh"], HID), random_weight(HID, d["sh"])
    L["ln"] = torch.rand(LAT, device=dev, dtype=bf16) + 0.5
    L["w13"] = _random_int32(E, LAT // 16, 2 * N * 2)  # marlin tile layout, 4-bit: [E, K/16, N*16/8]
    L["w2"] = _random_int32(E, N // 16, LAT * 2)
    L["s13"] = torch.randint(117, 121, (E, LAT // 32, 2 * N), dtype=torch.uint8, device=dev).view(
        torch.float8_e8m0fnu
    )
    L["s2"] = torch.randint(119, 123, (E, N // 32, LAT), dtype=torch.uint8, device=dev).view(
        torch.float8_e8m0fnu
    )
    return L


def make_attn(d, kind):
    """Random weights of both AttnRes and one attention block, kind "kda" or "mla"."""
    L = {}
    for k in ("ar1", "ar2"):
        L[k] = (
            torch.rand(HID, device=dev, dtype=bf16) + 0.5,
            torch.randn(HID, device=dev, dtype=bf16) * 0.02,
            torch.rand(HID, device=dev, dtype=bf16) + 0.5,
        )
    P, H = d["P"], d["H"]
    L["o_w"] = random_weight(HID, P)
    if kind == "kda":
        L["in_w"], L["fb_w"] = random_weight(d["n_in"], HID), random_weight(P, D)
        L["conv_w"] = torch.randn(3 * P, 4, device=dev) * 0.5
        L["conv_wm"] = L["conv_w"].view(3, P, 4).transpose(1, 2).contiguous()
        L["A_log"] = torch.rand(H, device=dev)
        L["dt_bias"] = torch.randn(P, device=dev) * 0.1
        L["onorm"] = torch.rand(D, device=dev, dtype=bf16) + 0.5
        L["onorm_f"] = L["onorm"].float()
    else:
        L["a_w"] = random_weight(2112 + P, HID)
        L["qn"], L["kvn"] = (torch.rand(n, device=dev, dtype=bf16) + 0.5 for n in (1536, 512))
        L["qb_w"] = random_weight(H * 192, 1536)
        kvb = random_weight(H * 256, 512)
        uk, uv = kvb.T.view(512, H, 256).split([128, 128], dim=-1)
        L["W_UV"], L["W_UK_T"] = uv.transpose(0, 1), uk.permute(1, 2, 0)
    return L


def kda_state(d, B, L):
    """Adds the fp32 state [B + 1, H, 128, 128] and conv state [B + 1, 3, 3P] to L; slot 0 is the null
    slot."""
    P, H = d["P"], d["H"]
    L["state"] = torch.randn(B + 1, H, D, D, device=dev) * 0.1
    L["conv_state"] = torch.randn(B + 1, 3, 3 * P, device=dev, dtype=bf16)


def mla_state(d, B, ctx, pool, Ls):
    """One KV pool; every layer and request gets its own distinct random pages where the pool is large
    enough."""
    nb = pool.shape[0]
    per = (ctx + PAGE - 1) // PAGE
    perm = torch.randperm(nb, device=dev, dtype=i32)
    need = B * per
    for i, L in enumerate(Ls):
        o = (i * need) % max(1, nb - need + 1)
        L["btab"] = perm[o : o + need].view(B, per).contiguous()
        last = L["btab"][:, (ctx - 1) // PAGE].long()
        L["slotmap"] = last * PAGE + (ctx - 1) % PAGE
    st = {"seqlens": torch.full((B,), ctx, dtype=i32, device=dev), "kv": pool}
    q = torch.randn(B, 1, d["H"], 576, device=dev, dtype=bf16)
    _, _, md, ns = torch.ops._flashmla_C.dense_decode_fwd(
        q, pool.unsqueeze(-2), 512, st["seqlens"], Ls[0]["btab"], MLA_SCALE, True, None, None, None
    )
    st["md"], st["ns"] = md, ns
    return st


def common_state(B):
    """What all layers of a step share: prefix, AttnRes blocks, slots; st["reset"]() restores the prefix."""
    emb = torch.randn(B, HID, device=dev, dtype=bf16)
    st = {
        "prefix": emb.clone(),
        "blocks": torch.randn(B, 8, HID, device=dev, dtype=bf16),
        "slots": torch.arange(1, B + 1, dtype=i32, device=dev),
    }
    st["reset"] = lambda: st["prefix"].copy_(emb)
    return st


def bytes_layer(d, kind, B, distinct, ctx=0):
    """Bytes that the stock sequence has to move per layer (weights once, states, KV); and with the replicated
    router/latent-down/latent-up sharded over TP ("ideal")."""
    P, H, N, tp = d["P"], d["H"], d["inter"], d["tp"]
    w = 2 * HID * P  # o_proj
    if kind == "kda":
        w += 2 * (d["n_in"] * HID + P * D)
        w += B * (2 * 4 * H * D * D + 2 * 2 * 3 * 3 * P)
    else:
        w += 2 * ((2112 + P) * HID + H * 192 * 1536 + 2 * H * 128 * 512) + B * ctx * 576 * 2
    ex = distinct * (3 * N * LAT) * (0.5 + 1 / 32)
    sh = 2 * (2 * d["sh"] * HID + HID * d["sh"])
    rep = 2 * (E * HID + 2 * LAT * HID)
    act = B * HID * 2 * (2 * (NBLK + 3) + 6)
    nopad = 3072 / tp / N
    return {"stock": w + ex + sh + rep + act, "ideal": w + ex * nopad + sh + rep / tp + act, "experts": ex}


def make_attn_small(d):
    """Only what the KDA core needs."""
    P, H = d["P"], d["H"]
    L = {"conv_w": torch.randn(3 * P, 4, device=dev) * 0.5}
    L["conv_wm"] = L["conv_w"].view(3, P, 4).transpose(1, 2).contiguous()
    L["A_log"], L["dt_bias"] = torch.rand(H, device=dev), torch.randn(P, device=dev) * 0.1
    L["onorm"] = torch.rand(D, device=dev, dtype=bf16) + 0.5
    L["onorm_f"] = L["onorm"].float()
    return L


def make_attn_mla_small(d):
    """Only W_UK and W_UV, in vLLM's strided layout."""
    kvb = random_weight(d["H"] * 256, 512)
    uk, uv = kvb.T.view(512, d["H"], 256).split([128, 128], dim=-1)
    return {"W_UV": uv.transpose(0, 1), "W_UK_T": uk.permute(1, 2, 0)}
