"""Numerics of the stock pieces against plain float64 torch, on the GPU: relative L2 errors (the table is
in the facts)."""

import time

import torch

from k3_decode.peers.stock_layer import (
    EPS,
    HID,
    LAT,
    MLA_SCALE,
    NBLK,
    PAGE,
    TOPK,
    D,
    E,
    StockLayer,
    bf16,
    common_state,
    dev,
    dims,
    i32,
    kda_state,
    make_attn,
    make_moe,
    mla_state,
    random_weight,
)
from k3_decode.peers.timing import relative_error


def check_all(S, tps):
    """Every check at every TP; a check that raises is reported as text, so that the others still run."""
    found = {}

    def run(name, check, *arguments):
        started = time.time()
        try:
            found[name] = check(*arguments)
            torch.cuda.synchronize()
        except Exception as ex:  # noqa: BLE001 - any failure of a peer is a finding of this check
            found[name] = f"FAIL {type(ex).__name__}: {str(ex)[:400]}"
        print(f"check {name}: {found[name]}  ({time.time() - started:.1f} s)", flush=True)

    for tp in tps:
        d = dims(tp)
        H, P = d["H"], d["P"]
        for B in (1, 2, 4, 8, 16):
            n = StockLayer(S, tp, B)
            for nn, k in (
                (P, D),
                (2 * d["sh"], HID),
                (2112, HID),
                (H * 192, 1536),
                (LAT, HID),
                (HID, d["sh"]),
                (HID, P),
            ):
                if n.plans.get((nn, k), {}).get(B):
                    run(f"tp{tp}.lin{nn}x{k}.B{B}", check_linear, n, nn, k)
            run(f"tp{tp}.router.B{B}", check_router, n)
            run(f"tp{tp}.kda_proj.B{B}", check_kda_proj, n, d)
        run(f"tp{tp}.kda_core", check_kda_core, S, d)
        run(f"tp{tp}.marlin_moe", check_marlin, S, d)
        run(f"tp{tp}.grouped_topk", check_topk, S, d)
        run(f"tp{tp}.mla_attn", check_mla, S, d)
        run(f"tp{tp}.attn_res", check_attn_res, S, d)
    return found


def check_linear(n, nn, k):
    x, w = torch.randn(n.B, k, device=dev, dtype=bf16), random_weight(nn, k)
    entry = n.plans.get((nn, k), {}).get(n.B)
    return [entry[0] if entry else "cublas", relative_error(n.lin(x, w), x.double() @ w.double().T)]


def check_router(n):
    x, w = torch.randn(n.B, HID, device=dev, dtype=bf16), random_weight(E, HID)
    return relative_error(n.router(x, {"r_w": w}), x.double() @ w.double().T)


def check_kda_proj(n, d):
    H, P = d["H"], d["P"]
    x = torch.randn(n.B, HID, device=dev, dtype=bf16)
    L = make_attn(d, "kda")
    m, g, g1, b = n.kda_proj(x, L)
    y = x.double() @ L["in_w"].double().T
    fa = y[:, 4 * P : 4 * P + D].to(bf16).double()
    return [
        relative_error(torch.cat([m, g], -1), y[:, : 4 * P]),
        relative_error(b, y[:, 4 * P + D : 4 * P + D + H]),
        relative_error(g1, fa @ L["fb_w"].double().T),
    ]


def check_kda_core(S, d):
    """Per path: error of the output, error of the fp32 state, and whether the conv state is exact."""
    H, P, B = d["H"], d["P"], 4
    n = StockLayer(S, d["tp"], B)
    L = make_attn(d, "kda")
    kda_state(d, B, L)
    st = common_state(B)
    p = torch.randn(B, d["n_in"], device=dev, dtype=bf16)
    mixed, g, _, beta = p.split([3 * P, P, D, H] + ([d["pad"]] if d["pad"] else []), dim=-1)[:4]
    g1 = torch.randn(B, P, device=dev, dtype=bf16)
    s0, c0 = L["state"].clone(), L["conv_state"].clone()
    outs = {}
    for mode in [False, True] if H == 12 else [True]:
        L["state"].copy_(s0)
        L["conv_state"].copy_(c0)
        o = n.kda_core(mixed, g, g1, beta, L, st, force_triton=mode)
        outs[mode] = (o, L["state"].clone(), L["conv_state"].clone())
    w = L["conv_w"].double()
    win = torch.cat([c0[1:].double(), mixed.double().unsqueeze(1)], 1)  # [B,4,3P]
    u = torch.einsum("btc,ct->bc", win, w)
    y = u * torch.sigmoid(u)
    q, k, v = y.view(B, 3, H, D).unbind(1)
    q = q * torch.rsqrt((q * q).sum(-1, True) + 1e-6) * D**-0.5
    k = k * torch.rsqrt((k * k).sum(-1, True) + 1e-6)
    gg = -5 * torch.sigmoid(
        torch.exp(L["A_log"].double())[None, :, None] * (g1.double() + L["dt_bias"].double()).view(B, H, D)
    )
    bt = torch.sigmoid(beta.double())
    St = s0[1:].double() * torch.exp(gg)[:, :, None, :]
    dd = v - torch.einsum("bhvk,bhk->bhv", St, k)
    St = St + (bt[..., None] * dd)[..., None] * k[:, :, None, :]
    o = torch.einsum("bhvk,bhk->bhv", St, q)
    on = o * torch.rsqrt((o * o).mean(-1, True) + EPS) * L["onorm_f"].double()
    ref = (on * torch.sigmoid(g.double().view(B, H, D))).reshape(B, P)
    return {
        ("triton" if m else "native"): [
            relative_error(a[0], ref),
            relative_error(a[1][1:], St),
            bool(torch.equal(a[2][1:], win[:, 1:].to(bf16))),
        ]
        for m, a in outs.items()
    }


def check_marlin(S, d):
    """True MXFP4 weights repacked with the stock repack op, against a float64 dequantised product."""
    N, B = d["inter"], 3
    n = StockLayer(S, d["tp"], B)
    mag = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=dev, dtype=torch.float64)
    val = torch.cat([mag, -mag])
    use = torch.randperm(E, device=dev)[:24]
    L = make_moe(d)
    deq = {}
    perm = [i + 8 * j for i in range(8) for j in range(8)]
    for name, (nn, kk) in {"w13": (2 * N, LAT), "w2": (LAT, N)}.items():
        for e in use.tolist():
            pk = torch.randint(0, 256, (nn, kk // 2), dtype=torch.uint8, device=dev)
            sc = torch.randint(117, 121, (nn, kk // 32), dtype=torch.uint8, device=dev)
            full = torch.stack([val[(pk & 15).long()], val[(pk >> 4).long()]], -1).view(nn, kk)
            deq[name, e] = full * torch.exp2(sc.double() - 127).repeat_interleave(32, 1)
            L[name][e] = torch.ops._C.gptq_marlin_repack(pk.view(i32).T.contiguous(), kk, nn, 4, False)
            s = sc.view(torch.float8_e8m0fnu).to(bf16).T
            s = s.reshape(-1, 64)[:, perm].reshape(-1, nn).contiguous()
            s = s.view(-1, 4)[:, [0, 2, 1, 3]].reshape(s.size(0), -1).to(torch.float8_e8m0fnu)
            L["s13" if name == "w13" else "s2"].view(torch.uint8)[e] = s.view(torch.uint8)
    ti = torch.stack([use[torch.randperm(24, device=dev)[:TOPK]] for _ in range(B)]).to(i32)
    tw = torch.rand(B, TOPK, device=dev)
    tw /= tw.sum(-1, True)
    z = torch.randn(B, LAT, device=dev, dtype=bf16)
    o = n.experts(z, tw, ti, L)
    ref = torch.zeros(B, LAT, device=dev, dtype=torch.float64)
    for b in range(B):
        for j in range(TOPK):
            e = int(ti[b, j])
            h = (deq["w13", e] @ z[b].double()).to(bf16).double()
            gt, up = h[:N], h[N:]
            a = (4 * torch.tanh(gt / 4) * torch.sigmoid(gt)) * (25 * torch.tanh(up / 25))
            ref[b] += tw[b, j].double() * (deq["w2", e] @ a.to(bf16).double())
    return relative_error(o, ref)


def check_topk(S, d):
    lg = torch.randn(8, E, device=dev)
    b = torch.randn(E, device=dev) * 0.01
    tw, ti = StockLayer(S, d["tp"], 8).topk(lg, {"r_bias": b})
    s = lg.sigmoid()
    ids = (s + b).topk(TOPK, -1).indices
    same = all(set(ids[i].tolist()) == set(ti[i].tolist()) for i in range(8))
    w = s.gather(1, ti.long())
    w = w / w.sum(-1, True)
    return [same, relative_error(tw, w), str(ti.dtype)]


def check_mla(S, d):
    """Error of the gated attention output and of the inserted KV row."""
    H, P, B, ctx = d["H"], d["P"], 3, 1000
    n = StockLayer(S, d["tp"], B)
    L = make_attn(d, "mla")
    pool = torch.randn(1024, PAGE, 576, device=dev, dtype=bf16)
    st = common_state(B)
    st.update(mla_state(d, B, ctx, pool, [L]))
    h = torch.randn(B, HID, device=dev, dtype=bf16)
    o = n.mla_attn(h, L, st)
    c = (h.double() @ L["a_w"].double().T).to(bf16).double()

    def normed(x, w):
        return (x * torch.rsqrt((x * x).mean(-1, True) + EPS) * w.double()).to(bf16).double()

    q = (normed(c[:, :1536], L["qn"]) @ L["qb_w"].double().T).to(bf16).double().view(B, H, 192)
    ql = torch.einsum("bhp,hpl->bhl", q[..., :128], L["W_UK_T"].double()).to(bf16).double()
    qq = torch.cat([ql, q[..., 128:]], -1)
    kv = pool[L["btab"].long()].view(B, -1, 576)[:, :ctx].double()
    newrow = torch.cat([normed(c[:, 1536:2048], L["kvn"]), c[:, 2048:2112]], -1)
    inserted = relative_error(kv[:, -1], newrow)
    p = torch.softmax(torch.einsum("bhd,btd->bht", qq, kv) * MLA_SCALE, -1)
    lat = torch.einsum("bht,btd->bhd", p, kv[..., :512]).to(bf16).double()
    ov = torch.einsum("bhl,hlv->bhv", lat, L["W_UV"].double()).to(bf16).double().reshape(B, P)
    return [relative_error(o, ov * torch.sigmoid(c[:, 2112:])), inserted]


def check_attn_res(S, d):
    B = 4
    n = StockLayer(S, d["tp"], B)
    L = make_attn(d, "kda")
    st = common_state(B)
    dl = torch.randn(B, HID, device=dev, dtype=bf16)
    p0 = st["prefix"].clone()
    o = n.attn_res(st, dl, L, "ar1")
    p = (p0.float() + dl.float()).to(bf16)
    src = torch.cat([st["blocks"][:, :NBLK], p[:, None]], 1).double()
    w = (L["ar1"][0].float() * L["ar1"][1].float()).double()
    s = (src * w).sum(-1) * torch.rsqrt((src * src).mean(-1) + EPS)
    m = (torch.softmax(s, -1)[..., None] * src).sum(1)
    return relative_error(o, m * torch.rsqrt((m * m).mean(-1, True) + EPS) * L["ar1"][2].double())
