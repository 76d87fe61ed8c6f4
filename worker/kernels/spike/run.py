"""Builds the random 8B-shaped model, packs it, checks the kernel against torch and times it. Usage: run.py [limits] [check] [stress] [time] [trace] [mute]"""
import ctypes, sys, time, os, torch
torch.backends.cuda.matmul.allow_tf32 = False
torch.manual_seed(1)
L, H, I, V, S, NBMAX, G = 32, 4096, 14336, 128256, 512, 8, 128
dev = "cuda"; lib = ctypes.CDLL(os.environ.get("SPIKE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "libspike.so")))
class P(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in "weights gamma embedding kv rope words first_token tokens logits report states trace".split()] + \
               [("ntok", ctypes.c_int), ("epoch0", ctypes.c_uint32)] + [(n, ctypes.c_int) for n in "nslot window skip window_o".split()]
assert ctypes.sizeof(P) == lib.spike_params_size()
lib.spike_run.restype = ctypes.c_float; lib.spike_report.restype = ctypes.c_void_p; lib.spike_words_bytes.restype = ctypes.c_uint64
for f in ("spike_read_plain", "spike_read_bulk"): getattr(lib, f).restype = ctypes.c_float
T0 = time.time()
def log(*a): print(f"[{time.time()-T0:6.1f}s]", *a, flush=True)
def w(*s): return torch.empty(*s, dtype=torch.bfloat16, device=dev).normal_(0, 0.02)
def frag(W):  # [R, K] -> [R/16, K/16, 256] in the register order of mma.m16n8k16's A
    R, K = W.shape
    return W.view(R // 16, 2, 8, K // 16, 2, 4, 2).permute(0, 3, 2, 5, 4, 1, 6).reshape(R // 16, K // 16, 256)
perm = torch.tensor([64 * hi + 8 * r + g for r in range(8) for hi in range(2) for g in range(8)], device=dev)  # rope pairs 8 rows apart
class Layer: pass
layers = []; stream = []
lb = G * (32 * 12288 + 16 * 16384 + 112 * 16384 + 64 * 14336); total_w = L * lb + V * H * 2
packed = torch.empty(total_w // 2, dtype=torch.bfloat16, device=dev); off = 0
def put(t):
    global off
    n = t.numel(); packed[off:off + n].view(t.shape).copy_(t); off += n
for l in range(L):
    a = Layer(); a.q, a.k, a.v, a.o = w(H, H), w(1024, H), w(1024, H), w(H, H); a.gate, a.up, a.down = w(I, H), w(I, H), w(H, I)
    a.o *= 0.125; a.down *= 0.125  # 1 / sqrt(2 L), as trained models start: an all-0.02 random stack amplifies rounding noise tenfold
    qp = a.q.view(32, 128, H)[:, perm]; kp = a.k.view(8, 128, H)[:, perm]; vp = a.v.view(8, 128, H)
    qkv = torch.cat([qp.reshape(8, 512, H), kp, vp], 1).reshape(6144, H)
    put(frag(qkv).view(G, 3, 16, 2, 8, 256).permute(3, 2, 0, 4, 1, 5))
    put(frag(a.o).view(G, 2, 16, 16, 256).permute(2, 0, 3, 1, 4))
    gu = torch.stack([frag(a.gate).view(G, 7, 16, 16, 256), frag(a.up).view(G, 7, 16, 16, 256)], 2)  # s pi gu w kb
    put(gu.permute(1, 3, 0, 4, 2, 5))
    put(frag(a.down).view(G, 2, 16, 4, 14, 256).permute(3, 2, 0, 4, 1, 5)); layers.append(a)
head = w(V, H); fh = frag(head)
put(fh[:7936].view(31, G, 2, 16, 16, 256).permute(0, 3, 1, 4, 2, 5)); put(fh[7936:].view(80, 16, 16, 256).permute(1, 0, 2, 3)); assert off == packed.numel()
emb = w(V, H) * float(os.environ.get("EMB", 1)); gamma = (1 + 0.1 * torch.randn(2 * L + 1, H, device=dev)).bfloat16()
ang = (S - 1) * 500000.0 ** (-torch.arange(64, device=dev, dtype=torch.float64) / 64)
rope = torch.stack([ang.cos(), ang.sin()], 1).float().contiguous()
K = w(L, NBMAX, 8, S, 128) * 10; Vc = w(L, NBMAX, 8, S, 128) * 10   # natural order of dimensions, already rotated
def pack_kv(nb):
    out = torch.empty(L, nb, 8, 32, 2, 8, 256, dtype=torch.bfloat16, device=dev)
    for l in range(L):
        kk = K[l, :nb][..., perm].reshape(nb * 8 * S, 128); out[l, :, :, :, 0] = frag(kk).view(nb, 8, 32, 8, 256)
        vt = Vc[l, :nb].reshape(nb * 8, 32, 16, 8, 16).permute(0, 1, 3, 4, 2).reshape(nb * 8 * 32 * 8 * 16, 16); out[l, :, :, :, 1] = frag(vt).view(nb, 8, 32, 8, 256)
    return out
toks = torch.tensor([17, 4242, 99, 128255, 5, 70001, 31337, 12], device=dev, dtype=torch.int32)
bytes_token = total_w; torch.cuda.synchronize(); log(f"model ready, {total_w/1e9:.3f} GB of weights")

def rms(h): return torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-5)
def reference(tokens, rounded, states=None):
    """fp32 forward of one position; `rounded`: bf16 where the kernel rounds."""
    r = (lambda x: x.bfloat16().float()) if rounded else (lambda x: x)
    h = emb[tokens.long()].float(); n = h.shape[0]; cos, sin = rope[:, 0], rope[:, 1]
    def mv(x, W): return torch.cat([x @ W[i:i + 16384].float().T for i in range(0, W.shape[0], 16384)], 1)
    def rot(x): a, b = x[..., :64], x[..., 64:]; return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    for l, a in enumerate(layers):
        x = r(h * gamma[2 * l].float()); i = rms(h)
        q = r(rot((mv(x, a.q) * i).view(n, 32, 128))); k = r(rot((mv(x, a.k) * i).view(n, 8, 128))); v = r((mv(x, a.v) * i).view(n, 8, 128))
        KK = K[l, :n].float().clone(); KK[:, :, -1] = k; VV = Vc[l, :n].float().clone(); VV[:, :, -1] = v
        sc = torch.einsum("njhd,njsd->njhs", q.view(n, 8, 4, 128), KK) / 128 ** 0.5
        o = r(torch.einsum("njhs,njsd->njhd", sc.softmax(-1), VV)).reshape(n, H); h = h + mv(o, a.o)
        if states is not None: states.append(h)
        x = r(h * gamma[2 * l + 1].float()); i = rms(h); g, u = mv(x, a.gate) * i, mv(x, a.up) * i
        h = h + mv(r(torch.nn.functional.silu(g) * u), a.down)
        if states is not None: states.append(h)
    return mv(r(h * gamma[2 * L].float()), head) * rms(h)

SCOUT, ALL, NONE = 0, 1, 2
class Run:
    def __init__(s, nb, epoch0=1):
        s.nb = nb; s.kv = pack_kv(nb); s.words = torch.zeros(lib.spike_words_bytes(nb), dtype=torch.uint8, device=dev); s.e = epoch0
        s.logits = torch.full((nb, V), float("nan"), device=dev); s.states = torch.zeros(L, 2, nb, H, device=dev); s.trace = torch.zeros(G, L, 24, dtype=torch.int64, device=dev)
    def __call__(s, first, ntok, wait=SCOUT, nslot=None, window=4, window_o=2, skip=0, warm=0, reps=1, logits=True, trace=False):
        first = first[:s.nb].contiguous(); out = torch.full((ntok, s.nb), -1, dtype=torch.int32, device=dev); nslot = nslot or (13 if s.nb == 1 else 10)
        p = P(packed.data_ptr(), gamma.data_ptr(), emb.data_ptr(), s.kv.data_ptr(), rope.data_ptr(), s.words.data_ptr(), first.data_ptr(), out.data_ptr(), s.logits.data_ptr() if logits else None,
              lib.spike_report(), s.states.data_ptr() if trace else None, s.trace.data_ptr(), ntok, s.e, nslot, window, skip, window_o)
        torch.cuda.synchronize(); ms = lib.spike_run(ctypes.byref(p), s.nb, wait, int(trace), warm, reps)
        if ms < 0: log("FAILED", ms); sys.exit(1)
        s.e = (s.e + (warm + reps) * ntok * (L + 1)) & 0xffffffff; torch.cuda.synchronize(); return out, ms
def rel(a, b): return ((a - b).norm(dim=-1) / b.norm(dim=-1)).tolist()

def check():
    r1, r8 = Run(1), Run(8); out, _ = r1(toks, 1, trace=True); l1 = r1.logits.clone(); st = []
    rf, rb = reference(toks, False), reference(toks, True, st)
    log("residual, relative L2 against fp32 with the same roundings, after o and down of layers 0, 1, 7, 31:", [f"{rel(r1.states[i // 2, i % 2], st[i][:1])[0]:.1e}" for i in (0, 1, 2, 3, 14, 15, 62, 63)])
    r8(toks, 1); log("logits, 8 columns, against fp32:", [f"{x:.4f}" for x in rel(r8.logits, rf)]); log("against fp32 with roundings:   ", [f"{x:.4f}" for x in rel(r8.logits, rb)]); log("roundings alone against fp32:  ", [f"{x:.4f}" for x in rel(rb, rf)])
    log("column 0 of 8 bit-equal to batch 1:", torch.equal(l1[0], r8.logits[0])); first = out[0].contiguous(); r1(first, 1); log("second token against fp32 with roundings:", rel(r1.logits, reference(torch.cat([first, toks[1:]]), True)[:1]))
    out, _ = r1(toks, 8); la = r1.logits.clone(); out8, _ = r8(toks, 8); log("8 tokens, batch 1 against column 0 of 8: tokens", torch.equal(out[:, 0], out8[:, 0]), "logits", torch.equal(la[0], r8.logits[0]))
    rw = Run(1, epoch0=2 ** 32 - 100); o2, _ = rw(toks, 8); log("bit-equal over a wrap of the tag:", torch.equal(o2, out) and torch.equal(rw.logits, la))
def stress():
    r1, r8 = Run(1), Run(8); o1, _ = r1(toks, 3); l1 = r1.logits.clone(); ref = None
    for r in (r1, r8):
        for wait in (SCOUT, ALL) if "ALLONLY" not in os.environ else (ALL,):
            bad = badt = 0
            for k in range(100):
                o, _ = r(toks, 3, wait=wait, nslot=12 - (k % 4 if "ALLONLY" not in os.environ else 0), window=2 + k % 4); bad += not (torch.equal(o[:, 0], o1[:, 0]) and torch.equal(r.logits[0], l1[0]))
                if r is r8 and ref is None: ref = r.logits.clone()
                if r is r8: badt += not torch.equal(ref, r.logits)
            log(f"batch {r.nb}, wait {wait}: of 100 launches of 3 tokens, column 0 differs from batch 1 in {bad}, any column from the first launch in {badt}")
KVB = L * 8 * S * 128 * 2 * 2
def line(name, ms, nb, best): b = bytes_token + KVB * nb; print(f"{name:64s} {ms:7.3f} ms {b/ms/1e6:6.0f} GB/s {100*b/ms/1e6/4653:5.1f} % of 4653 {100*b/ms/1e6/best:5.1f} % of limit", flush=True)
def limits():
    n = 8 << 30; out = torch.zeros(16, device=dev); ptr = ctypes.c_void_p(packed.data_ptr()); o = ctypes.c_void_p(out.data_ptr()); best = 0
    x = lib.spike_read_plain(ptr, ctypes.c_uint64(n), o, 2, 1024); best = max(best, x); log(f"plain loads, 2 x 1024 threads: {x:.0f} GB/s")
    for blocks, slots, win in ((132, 13, 13), (128, 13, 13), (132, 12, 3), (128, 12, 3), (132, 12, 4), (128, 12, 4), (120, 12, 4), (128, 12, 5), (128, 12, 6), (128, 12, 8)):
        x = lib.spike_read_bulk(ptr, ctypes.c_uint64(n), blocks, slots, win); best = max(best, x) if win > 8 else best; log(f"bulk copies, {blocks} blocks, {win*16} KiB in flight: {x:.0f} GB/s")
    return best
def timing(best):
    kw = dict(warm=1, reps=5, logits=False); names = ["scout", "all polled", "NO WAITS (wrong results)"]
    for nb in (1, 8):
        r = Run(nb); full = 13 if nb == 1 else 10
        _, ms = r(toks, 256, **kw); line(f"batch {nb}, best: scout, ring {full * 16}, in flight 64, 32 for o; 256 tokens", ms, nb, best)
        for wait, ns, w, wo in ((0, full, 3, 3), (0, full, 4, 4), (0, full, 4, 3), (0, full, 4, 2), (0, full, 5, 2), (0, full, 6, 3), (1, full, 4, 4), (1, full, 4, 2), (0, 6, 4, 2), (0, 8, 4, 2), (0, 10, 4, 2), (0, 12, 4, 2), (2, full, 3, 3), (2, full, 4, 4)):
            _, ms = r(toks, 32, wait=wait, nslot=ns, window=w, window_o=wo, **kw); line(f"batch {nb}, {names[wait]}, ring {ns * 16}, in flight {w * 16}, {wo * 16} for o", ms, nb, best)
def ablate(best):
    sites = dict(xa=10, xq=11, xp=14, xo=15, xm=16, xd=17)
    for nb in (1, 8):
        r = Run(nb); kw = dict(warm=1, reps=5, logits=False, wait=SCOUT if nb == 1 else ALL)
        for name, mask in [("none", 0)] + [(k, 1 << v - 10) for k, v in sites.items()] + [("xq xp xo", 0b110010), ("xq xp", 0b10010), ("xp xo", 0b110000), ("xa xm xd", 0b11000001), ("all", 0b11110011)]:
            for ex, wo in ((0, 2), (0, 4)): _, ms = r(toks, 32, skip=mask, window_o=wo, **kw); line(f"batch {nb}, waits skipped (wrong results): {name}; {wo * 16} KiB in flight for o", ms, nb, best)
def traces(nb):
    r = Run(nb); r(toks, 4, trace=True, logits=False); t = r.trace.float().cpu()[:, 2:30]; t64 = r.trace.cpu()[:, 2:30]
    d = lambda a, b: (t64[:, :, b] - t64[:, :, a]).float() / 1.755e3
    f = lambda x: f"mean {x.mean():6.2f} max {x.amax(0).mean():6.2f} min {x.amin(0).mean():6.2f}"
    print(f"-- trace, batch {nb}; us at 1.755 GHz; mean over blocks and layers, max and min over blocks")
    for n, a, b in (("wait for x (down -> qkv)", 0, 1), ("qkv chunks", 1, 2), ("qkv -> q seen by warp 0", 2, 4), ("attention leaf", 4, 5), ("leaves seen", 5, 6), ("merge", 6, 7), ("attention seen by warp 15", 7, 8), ("qkv done -> attention seen", 2, 8), ("o chunks", 8, 9),
                    ("o done -> x published", 9, 21), ("wait for x (o -> gate/up)", 21, 10), ("gate/up chunks", 10, 11), ("gate/up done -> published", 11, 22), ("gate/up done -> first act seen", 11, 12), ("down chunks", 12, 13), ("down done -> published", 13, 23)): print(f"{n:34s} {f(d(a, b))}")
    for n, i in (("qkv", 16), ("o", 17), ("gate/up", 18), ("down", 19)): x = t64[:, :, i].float() / 1.755e3; print(f"producer blocked by a full ring, {n:8s} {f(x)}")
    lay = (t64[:, 1:, 0] - t64[:, :-1, 0]).float() / 1.755e3; print(f"layer period {f(lay)}", flush=True)
a = sys.argv[1:]
if "mute" in a: Run(1)(toks, 2)
best = limits() if "limits" in a else 4653
if "check" in a: check()
if "stress" in a: stress()
if "time" in a: timing(best)
if "ablate" in a: ablate(best)
if "trace" in a: traces(1); traces(8)
log("done")
