"""Variants of the looped decoder, side by side on one GPU: builds the kernel with different `-D`s, checks it against
torch, compares bits, times.

    variants.py build 8b llama-1b small                  # needs nvcc, no GPU
    variants.py build 8b --name free --defines=-DLP_ABLATE_WAITS
    variants.py build fit --columns 8,32,64; variants.py wide fit --columns 32,64
    variants.py check small; variants.py bits gqa; variants.py time 8b --variants ,free --context 512,8192
    variants.py trace 8b --batch 8
    variants.py chain 8b llama-1b                        # steps that the sampler draws, beside greedy ones in the loop

`build` takes nvcc of the wheels nvidia-cuda-nvcc, -nvvm, -crt and -runtime 13.0, too.
`check`, `bits`, `time`, `chain` and `trace` need a GPU with torch, and the .cubin files that `build` wrote next to them
(--dir). Models are random; the product is measured with `looplane bench --device cuda`. `small` stands for seven small
shapes that cover every feature, `fit` for three that wide passes take.
"""
import argparse, contextlib, ctypes, heapq, itertools, os, struct, subprocess, sys, time

KERNELS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PAGE, LIMIT_GBS = 64, 4653
# columns: of looped_decoder.cu, and of wide_decoder.cu for decode and for prompts
NARROW, WIDE = (1, 8), (32, 64)
COLUMNS = (*NARROW, *WIDE)
SAMPLER_BLOCKS, SAMPLER_THREADS = 132, 512


def kernel_of(columns):
    return "looped_decoder" if columns in NARROW else "wide_decoder"


def most_leaves(n):
    leaves = 1
    while leaves < 16 and n % (2 * leaves) == 0:
        leaves *= 2
    return leaves


class Shape:
    """Dimensions, and what follows from them as in layout/shape.cuh."""

    def __init__(self, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256,
                 blocks=128, window=0, bias=0, norm=0, tied=0, ranks=1):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.eps, self.group, self.dim_tiles = 1e-5, heads // kv_heads, head_dim // 16
        self.down_leaves = most_leaves(intermediate * ranks) // ranks
        self.o_leaves = most_leaves(heads * ranks) // ranks
        self.down_steps = (intermediate // self.down_leaves + 15) // 16
        # (row tiles, k16 steps, tiles of a unit at most)
        ways = lambda leaves: 1 if ranks > 1 and leaves < 16 else 2
        self.qkv = ((heads + 2 * kv_heads) * self.dim_tiles, hidden // 16, 2)
        self.o = (hidden // 16, heads * self.dim_tiles, ways(self.o_leaves))
        self.gate_up = (2 * self.down_leaves * self.down_steps, hidden // 16, 2)
        self.down = (hidden // 16, self.down_leaves * self.down_steps, ways(self.down_leaves))
        self.head = ((vocab + 15) // 16 if ranks == 1 else -(-vocab // 256) * 16 // ranks, hidden // 16, 2)

    def of_rank(self, ranks, blocks):
        """The dimensions of one of several ranks."""
        own = {k: self.__dict__[k] for k in ("layers", "hidden", "head_dim", "vocab", "window", "bias", "norm", "tied")}
        return Shape(**own, heads=self.heads // ranks, kv_heads=max(1, self.kv_heads // ranks),
                     intermediate=self.intermediate // ranks, blocks=blocks, ranks=ranks)

    def defines(self, columns):
        names = dict(LAYERS=self.layers, HIDDEN=self.hidden, HEADS=self.heads, KV_HEADS=self.kv_heads,
                     HEAD_DIM=self.head_dim, INTERMEDIATE=self.intermediate, VOCAB=self.vocab, BLOCKS=self.blocks,
                     WINDOW=self.window, QKV_BIAS=self.bias, QK_NORM=self.norm, TIED=self.tied,
                     EPS=struct.unpack("<I", struct.pack("<f", self.eps))[0], COLUMNS=columns, RANKS=self.ranks)
        return [f"-DLP_{name}={value}" for name, value in names.items()]

    def together(self, block):
        return block * (self.qkv[0] + self.gate_up[0]) // self.blocks - self.others(block)

    def apart(self, block):
        return -(-block * self.qkv[0] // self.blocks)

    def others(self, block):
        """Tiles of gate and up before a block: in pairs where no block gets fuller by it."""
        tiles, up = self.gate_up[0], lambda n: -(-n // self.blocks)
        in_pairs = 2 * up(tiles // 2) == up(tiles)
        return block * (tiles // 2) // self.blocks * 2 if in_pairs else block * tiles // self.blocks

    def deals_together(self):
        """Whether q, k and v of several ranks are dealt together with gate and up."""
        most = lambda first: max(first(block + 1) - first(block) for block in range(self.blocks))
        both = lambda first: most(lambda block: first(block) + self.others(block))
        gives_none_back = (self.qkv[0] + self.gate_up[0]) // self.blocks >= -(-self.gate_up[0] // self.blocks)
        return gives_none_back and (most(self.together) <= most(self.apart) or both(self.together) < both(self.apart))

    def first_tile(self, product, block):
        if product is self.qkv and self.ranks > 1:
            return (self.together if self.deals_together() else self.apart)(block)
        return self.others(block) if product is self.gate_up else block * product[0] // self.blocks

    def units(self, product):
        """(first tile, tiles) of every unit, block by block."""
        most = product[2]
        for block in range(self.blocks):
            first, end = (self.first_tile(product, b) for b in (block, block + 1))
            for tile in range(first, end, most):
                yield tile, min(most, end - tile)


SHAPES = {
    "8b": {},
    "llama-1b": dict(layers=16, hidden=2048, head_dim=64, intermediate=8192, tied=1),
    "70b": dict(layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=28672),
    "3b": dict(layers=28, hidden=3072, heads=24, intermediate=8192, tied=1),
    "gqa": dict(layers=2, hidden=256, heads=8, kv_heads=4, head_dim=64, intermediate=384, vocab=768),
    "tied": dict(layers=2, hidden=128, heads=4, kv_heads=1, head_dim=64, intermediate=320, vocab=768, tied=1),
    "window": dict(layers=3, hidden=128, heads=4, kv_heads=2, head_dim=64, intermediate=384, vocab=768, window=48),
    "mha": dict(layers=2, hidden=128, heads=16, kv_heads=16, head_dim=64, intermediate=256, vocab=768),
    "bias": dict(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=384, vocab=768, bias=1),
    "norm": dict(layers=2, hidden=128, heads=4, kv_heads=2, intermediate=384, vocab=768, norm=1),
    # What wide passes take (kWideFits), small: 3, 6 and 4 qkv tiles a pair of blocks; 1, 1 and 2 tiles of the hidden
    # state a block.
    "wide": dict(layers=2, hidden=2048, heads=16, kv_heads=4, intermediate=4096, vocab=2048),
    "wide-norm": dict(layers=2, hidden=2048, heads=32, kv_heads=8, intermediate=6144, vocab=5000, bias=1, norm=1,
                      tied=1),
    "wide-window": dict(layers=2, hidden=4096, heads=16, kv_heads=8, intermediate=8192, vocab=2048, window=100),
    # Of two ranks on 128 blocks (ranks.py --apart) some have no tiles of a layer, because those of gate and up come in
    # pairs.
    "idle": dict(layers=3, hidden=1024, heads=16, intermediate=3072, vocab=5000, norm=1, tied=1),
    "odd": dict(layers=2, hidden=512, heads=8, kv_heads=2, intermediate=1376, vocab=5000, bias=1, norm=1),
}
FIT = ["wide", "wide-norm", "wide-window"]
SMALL = ["gqa", "tied", "window", "mha", "bias", "norm", "odd"]
GRIDS = (128, 132, 64, 8)


def fits(name):
    return name in [*FIT, "8b", "llama-1b"]


def cubin(args, name, columns, variant="", blocks=128):
    grid = "" if blocks == 128 else f"_{blocks}"
    return os.path.join(args.dir, f"{name}_{columns}{grid}{variant and '_' + variant}.cubin")


def build(args):
    for name in args.shapes:
        for blocks in GRIDS if name in args.grids else (128,):
            for columns in args.columns if fits(name) else NARROW:
                compile_cubin(cubin(args, name, columns, args.name, blocks), f"{kernel_of(columns)}.cu",
                              [*Shape(**SHAPES[name], blocks=blocks).defines(columns), *args.defines.split()])
        sampler = dict(VOCAB=Shape(**SHAPES[name]).vocab, BLOCKS=SAMPLER_BLOCKS, COLUMNS=max(WIDE),
                       SAMPLE_THREADS=SAMPLER_THREADS)
        compile_cubin(cubin(args, name, "sampler", args.name), "sampler.cu",
                      [f"-DLP_{key}={value}" for key, value in sampler.items()])


def compile_cubin(out, source, defines):
    command = [
        "nvcc", "-std=c++17", "-fmad=false", "-gencode=arch=compute_90a,code=sm_90a", "--cubin", "-Xptxas", "-v",
        "--expt-relaxed-constexpr", f"-I{KERNELS}", *defines, "-o", out,
        os.path.join(KERNELS, source)
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    told = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "spill" in line or "error" in line]
    print(os.path.basename(out), *told, sep=": ", flush=True)
    if done.returncode:
        sys.exit(1)


def gpu():
    """torch and the driver, only where they are needed."""
    global torch, driver
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")


def checked(result, what):
    if result:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(name))
        raise RuntimeError(f"{what}: {name.value}")


def fragments(weight):
    """[rows, k] -> [row tiles * k16 steps, 256] in the register order of mma.m16n8k16's A."""
    rows, k = weight.shape
    split = weight.view(rows // 16, 2, 8, k // 16, 2, 4, 2).permute(0, 3, 2, 5, 4, 1, 6)
    return split.reshape(rows // 16 * (k // 16), 256)


class Model:
    """Random weights, packed and plain."""

    def __init__(self, shape, deviation=0.02, plain=True, positions=1024, of=None, rank=0):
        """`of`: the whole model, of which this is a rank's share."""
        s, self.shape, device = shape, shape, "cuda"
        torch.manual_seed(1 + rank)
        order = torch.tensor([
            s.head_dim // 2 * half + 8 * tile + row for tile in range(s.dim_tiles) for half in range(2)
            for row in range(8)
        ], device=device)
        sizes = [p[0] * p[1] * 256 for p in (s.qkv, s.o, s.gate_up, s.down, s.head)]
        self.packed = torch.empty(s.layers * sum(sizes[:4]) + sizes[4], dtype=torch.bfloat16, device=device)
        self.bias = torch.zeros(s.layers, s.qkv[0] * 16, device=device)
        # Of builds with -DLP_LAYER_FORMAT=1, which can be timed: the weights are then whatever bits there are.
        self.scales = torch.ones(s.layers, 16 * sum(p[0] for p in (s.qkv, s.o, s.gate_up, s.down)), device=device)
        self.norms = torch.ones(s.layers, 2, s.head_dim, device=device)
        self.layers, self.used, out_scale = [], 0, (2 * s.layers) ** -0.5
        empty = lambda *size: torch.empty(*size, dtype=torch.bfloat16, device=device)
        weight = lambda *size, scale=1.0: empty(*size).normal_(0, deviation) * scale
        orders = [self.order(p) for p in (s.qkv, s.o, s.gate_up, s.down, s.head)]
        pad = s.down_steps * 16 - s.intermediate // s.down_leaves
        rows = lambda x: torch.nn.functional.pad(x.view(s.down_leaves, s.intermediate // s.down_leaves, -1),
                                                 (0, 0, 0, pad)).reshape(-1, 16, s.hidden)
        turned = lambda x, heads: x.view(heads, s.head_dim, -1)[:, order]
        # Tiles of gate and up: 8 rows of each, of a k block of down's input 0 to 3 and 8 to 11, then the others.
        mixed = lambda gate, up: torch.stack([x.view(-1, 2, 2, 4, s.hidden).transpose(1, 2) for x in (gate, up)], 2)
        joined = lambda q, k, v: torch.cat([
            turned(q, s.heads).reshape(s.kv_heads, s.group * s.head_dim, -1),
            turned(k, s.kv_heads),
            v.view(s.kv_heads, s.head_dim, -1)
        ], 1)
        for layer in range(s.layers):
            w = of.share(layer, rank, s) if of else dict(
                q=weight(s.heads * s.head_dim, s.hidden), k=weight(s.kv_heads * s.head_dim, s.hidden),
                v=weight(s.kv_heads * s.head_dim, s.hidden), o=weight(s.hidden, s.heads * s.head_dim, scale=out_scale),
                gate=weight(s.intermediate, s.hidden), up=weight(s.intermediate, s.hidden),
                down=weight(s.hidden, s.intermediate, scale=out_scale))
            if not of:
                w.update({"b" + n: torch.randn(w[n].shape[0], device=device) * 0.3 * s.bias for n in "qkv"})
                w.update({"n" + n: 1 + 0.3 * torch.randn(s.head_dim, device=device) * s.norm for n in "qk"})
            self.bias[layer] = joined(*(w["b" + n][:, None] for n in "qkv")).reshape(-1)
            self.norms[layer, 0], self.norms[layer, 1] = w["nq"][order], w["nk"][order]
            self.put(joined(w["q"], w["k"], w["v"]).reshape(-1, s.hidden), orders[0])
            self.put(w["o"], orders[1])
            self.put(mixed(rows(w["gate"]), rows(w["up"])).reshape(-1, s.hidden), orders[2])
            down = torch.nn.functional.pad(w["down"].view(s.hidden, s.down_leaves, -1), (0, pad))
            self.put(down.reshape(s.hidden, -1), orders[3])
            if plain:
                self.layers.append(w)
        rows = s.head[0] * 16
        padded = lambda x: torch.nn.functional.pad(x, (0, 0, 0, s.ranks * rows - x.shape[0]))
        shard = lambda x: padded(x)[rank * rows : (rank + 1) * rows]
        vocab = s.vocab if s.ranks == 1 else rows
        self.head = shard(of.head) if of else weight(vocab, s.hidden)
        self.put(torch.nn.functional.pad(self.head, (0, 0, 0, rows - self.head.shape[0])), orders[4])
        self.embedding = self.head if s.tied else shard(of.embedding) if of else weight(vocab, s.hidden)
        self.gamma = of.gamma if of else (1 + 0.1 * torch.randn(2 * s.layers + 1, s.hidden, device=device)).bfloat16()
        pairs = s.head_dim // 2
        counted = lambda n: torch.arange(n, device=device, dtype=torch.float64)
        angles = counted(positions)[:, None] * 500000.0 ** (-counted(pairs) / pairs)
        self.rope = torch.stack([angles.cos(), angles.sin()], 2).float().contiguous()
        self.bytes = self.packed.numel() * 2

    def share(self, layer, rank, own):
        """A rank's weights of a layer, by its dimensions."""
        w, s = self.layers[layer], self.shape
        q, i, kv = own.heads * own.head_dim, own.intermediate, rank * s.kv_heads // own.ranks * own.head_dim
        heads, keys = slice(rank * q, (rank + 1) * q), slice(kv, kv + own.kv_heads * own.head_dim)
        columns = slice(rank * i, (rank + 1) * i)
        rows = dict(q=heads, bq=heads, k=keys, bk=keys, v=keys, bv=keys, gate=columns, up=columns)
        return {
            **w, **{name: w[name][of].contiguous() for name, of in rows.items()},
            "o": w["o"][:, heads].contiguous(), "down": w["down"][:, columns].contiguous(),
        }

    def order(self, product):
        """Fragments of a product in the order in which they lie in memory."""
        steps = torch.arange(product[1])[:, None]
        return torch.cat([((tile + torch.arange(width)[None]) * product[1] + steps).reshape(-1)
                          for tile, width in self.shape.units(product)]).cuda()

    def put(self, weight, order):
        ordered = fragments(weight)[order].reshape(-1)
        self.packed[self.used : self.used + ordered.numel()] = ordered
        self.used += ordered.numel()

    def reference(self, tokens, rounded=True):
        """fp32 logits of every position; `rounded`: bf16 where the kernel rounds."""
        s, n, device = self.shape, len(tokens), "cuda"
        r = (lambda x: x.bfloat16().float()) if rounded else (lambda x: x)
        inverse = lambda x: torch.rsqrt((x * x).mean(-1, keepdim=True) + s.eps)
        cos, sin, pairs = self.rope[:n, None, :, 0], self.rope[:n, None, :, 1], s.head_dim // 2
        turn = lambda x: torch.cat(
            [x[..., :pairs] * cos - x[..., pairs:] * sin, x[..., pairs:] * cos + x[..., :pairs] * sin], -1)
        at = torch.arange(n, device=device)
        seen = at[None] <= at[:, None]
        if s.window:
            seen &= at[None] > at[:, None] - s.window
        h = self.embedding[tokens].float()
        for layer, w in enumerate(self.layers):
            x, scale = r(h * self.gamma[2 * layer].float()), inverse(h)
            q, k, v = ((x @ w[m].float().T * scale + w["b" + m]).view(n, -1, s.head_dim) for m in "qkv")
            if s.norm:
                q, k = q * inverse(q) * w["nq"], k * inverse(k) * w["nk"]
            q, k, v = r(turn(q)), r(turn(k)).repeat_interleave(s.group, 1), r(v).repeat_interleave(s.group, 1)
            scores = (torch.einsum("ihd,jhd->hij", q, k) / s.head_dim**0.5).masked_fill(~seen, float("-inf"))
            h = h + r(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)).reshape(n, -1) @ w["o"].float().T
            x, scale = r(h * self.gamma[2 * layer + 1].float()), inverse(h)
            h = h + r(torch.nn.functional.silu(x @ w["gate"].float().T * scale) *
                      (x @ w["up"].float().T * scale)) @ w["down"].float().T
        return (r(h * self.gamma[2 * s.layers].float()) @ self.head.float().T) * inverse(h)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig, with one attribute."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]


def load_module(path, name):
    """A kernel of a .cubin, and the numbers that it tells of itself."""
    module, function, needs, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    checked(driver.cuModuleLoadData(ctypes.byref(module), open(path, "rb").read()), f"cuModuleLoadData of {path}")
    checked(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    checked(driver.cuModuleGetGlobal_v2(ctypes.byref(needs), ctypes.byref(size), module, f"{name}_needs".encode()),
            "cuModuleGetGlobal")
    told = (ctypes.c_uint64 * (size.value // 8))()
    checked(driver.cuMemcpyDtoH_v2(told, needs, size), "cuMemcpyDtoH")
    return function, list(told)


def enqueue(function, blocks, threads, shared, parameter):
    """A cooperative launch behind what is in the stream."""
    buffer = ctypes.create_string_buffer(parameter, len(parameter))
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    cooperative = (ctypes.c_uint * 18)(2, 0, 1)  # CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_COOPERATIVE, padding, 1
    config = LaunchConfig((blocks, 1, 1), (threads, 1, 1), shared,
                          torch.cuda.current_stream().cuda_stream, ctypes.addressof(cooperative), 1)
    checked(driver.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None), "cuLaunchKernelEx")


class Kernel:
    """A kernel with its memory: the launches of looped_decoder.cu and wide_decoder.cu. KV pages, and words that nobody
    has to zero, begin full of NaN. `beside`: a kernel with the same pages, whose KV it uses."""

    def __init__(self, model, columns, path, pages=64, slots=8, beside=None):
        s, self.model, self.columns, self.pages, self.epoch = model.shape, model, columns, pages, 1
        self.function, (self.shared, self.threads, words, item_words, self.zeroed, self.item_pages, inbox,
                        self.group_rows) = load_module(path, kernel_of(columns))
        checked(driver.cuFuncSetAttribute(self.function, 8, self.shared), "cuFuncSetAttribute")
        self.stride = per_slot = pages // slots
        full = lambda n, type: torch.full((n,), float("nan"), dtype=type, device="cuda")
        self.words = torch.zeros(words + item_words * columns * s.kv_heads * -(-self.stride // self.item_pages),
                                 dtype=torch.uint8, device="cuda")
        if columns not in NARROW:
            self.words.fill_(0xFF)
        # Of several ranks each writes its logits to all, as far from the inbox as its own are.
        self.rank, padded = 0, -(-s.vocab // 16) * 16
        self.inbox = torch.zeros(inbox + columns * padded * 4, dtype=torch.uint8, device="cuda")
        self.inboxes, self.logits = [self.inbox], self.inbox[inbox:].view(torch.float32).view(columns, padded)
        self.logits.fill_(float("nan"))
        self.kv = beside.kv if beside else full(s.layers * pages * s.kv_heads * PAGE * s.head_dim * 2, torch.bfloat16)
        self.k_scale = beside.k_scale if beside else full(s.layers * pages * s.kv_heads * PAGE, torch.float32)
        shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).int()
        self.page_table = shuffled[: slots * per_slot].view(slots, per_slot).cuda()
        self.rows, self.items = torch.zeros(columns * 8, dtype=torch.int32, device="cuda"), None
        self.host = torch.zeros(1 << 17, dtype=torch.int64).pin_memory()  # report | 8: control | 128: tokens

    def launch(self, rows, steps=1, logits=True, stop=0, trace=None):
        """Tokens [steps][columns] as the kernel answers; rows: dicts of token, position, slot, first_row,
        first_position, sample, last."""
        with self.timed(rows, steps, stop):
            self.enqueue(len(rows), steps, int(logits), trace=trace)
        return self.tokens(steps)

    def tokens(self, steps):
        return (self.host[128 : 128 + steps * self.columns] & 0xFFFFFFFF).view(steps, self.columns)

    def parameter(self, rows, steps, flags, stopped=None, trace=None):
        """Of the next launch."""
        m = self.model
        tensors = [
            m.packed, m.gamma, None if m.shape.tied else m.embedding, m.bias, m.scales, m.norms, m.rope, self.kv,
            self.k_scale, self.words, self.page_table, self.logits, self.rows, None, self.items, stopped
        ]
        base = self.host.data_ptr()
        pointers = [0 if t is None else t.data_ptr() for t in tensors]
        pointers += [base + 1024, base + 64, base, 0 if trace is None else trace.data_ptr()]
        if self.zeroed:
            self.words[: self.zeroed] = 0
        inboxes = [inbox.data_ptr() for inbox in self.inboxes] + [0] * (16 - len(self.inboxes))
        parameter = struct.pack("<20Q8I16Q", *pointers, rows, steps, self.epoch, self.stride, self.pages, flags,
                                self.rank, 0, *inboxes)
        self.epoch += steps * (m.shape.layers + 1)
        return parameter

    def enqueue(self, *launch, **more):
        enqueue(self.function, self.model.shape.blocks, self.threads, self.shared, self.parameter(*launch, **more))

    @contextlib.contextmanager
    def timed(self, rows, steps, stop=0):
        """Around launches: gives them their rows, waits for them, and says how long they took and how many steps
        ran."""
        self.prepare(rows, steps, stop)
        yield
        self.record()
        self.finish()

    def prepare(self, rows, steps, stop=0):
        flat = []
        for row in rows:
            flat += [
                row["token"], row["position"], row["slot"], row["first_row"], row["first_position"],
                row.get("sample", 1), row.get("last", 1 << 30), 0
            ]
        self.rows[: len(flat)] = torch.tensor(flat, dtype=torch.int64).int()
        if self.group_rows:
            self.items = torch.tensor(self.deal(rows, steps), dtype=torch.int32).cuda()
        self.host.zero_()
        self.host[8] = stop
        torch.cuda.synchronize()
        self.events = []
        self.record()

    def deal(self, rows, steps):
        """Who attends to what, as worker/src/cuda/kernels/deal.rs has it."""
        s, items = self.model.shape, []
        blocks, span = s.blocks // s.kv_heads, self.item_pages * PAGE
        for i, row in enumerate(rows):
            place = i - row["first_row"]
            if (place + 1) % self.group_rows and i + 1 < len(rows) and rows[i + 1]["first_row"] == row["first_row"]:
                continue
            end = min(row["position"] + steps - 1, row.get("last", 1 << 30))
            begin, last = (max(0, of + 1 - s.window) // PAGE * PAGE if s.window else 0
                           for of in (row["position"], end))
            for n in range(begin // span, end // span + 1):
                seen = min(end + 1, (n + 1) * span) - max(last, n * span)
                items.append((-(-max(1, seen) // 16), i, n))
        loads, lists = [(0, block) for block in range(blocks)], [[] for _ in range(blocks)]
        for leaves, i, n in sorted(items, key=lambda item: (-item[0], *item[1:])):
            load, block = loads[0]
            heapq.heapreplace(loads, (load + leaves, block))
            lists[block].append(i | n << 8)
        begins = [blocks + 1 + n for n in itertools.accumulate((len(of) for of in lists), initial=0)]
        return begins + sum(lists, [])

    def record(self):
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def finish(self):
        try:
            torch.cuda.synchronize()
        except Exception as error:
            report = self.host[:4].view(torch.int32)[1:6].tolist()
            print(f"rank {self.rank} failed:", str(error).splitlines()[0],
                  "| block, thread, site, expected, seen:", report, flush=True)
            os._exit(1)
        self.ms, self.ran = self.events[0].elapsed_time(self.events[1]), int(self.host[8]) >> 32

    def prompt(self, tokens, slot=0, chunk=None):
        """Runs a prompt in passes; the next token, and the logits it came from."""
        chunk, n = chunk or self.columns, len(tokens)
        for first in range(0, n, chunk):
            count = min(chunk, n - first)
            rows = [
                dict(token=int(tokens[first + i]), position=first + i, slot=slot, first_row=0, first_position=first,
                     sample=int(first + i == n - 1)) for i in range(count)
            ]
            out = self.launch(rows)
        return int(out[0, count - 1]), self.logits[count - 1, : self.model.shape.vocab].clone()

    def prompts(self, prompts, last=True):
        """Runs prompts (by slot) in passes full of rows of any of them; what their last positions sampled and the
        logits, by slot. Without `last` nothing samples."""
        rows = [(slot, position) for slot, tokens in prompts.items() for position in range(len(tokens))]
        result = {}
        for first in range(0, len(rows), self.columns):
            chunk, begun = rows[first : first + self.columns], {}
            for i, (slot, position) in enumerate(chunk):
                begun.setdefault(slot, (i, position))
            samples = [last and position + 1 == len(prompts[slot]) for slot, position in chunk]
            out = self.launch([
                dict(token=int(prompts[slot][position]), position=position, slot=slot, first_row=begun[slot][0],
                     first_position=begun[slot][1], sample=int(sample))
                for (slot, position), sample in zip(chunk, samples)
            ])
            for i, (slot, _) in enumerate(chunk):
                if samples[i]:
                    result[slot] = int(out[0, i]), self.logits[i, : self.model.shape.vocab].clone()
        return result


class Chain:
    """Steps of a kernel that the sampler draws: launches of either in turn."""

    def __init__(self, kernel, path):
        self.kernel, padded = kernel, kernel.logits.shape[1]
        self.function, (self.threads, words) = load_module(path, "sampler")
        zeros = lambda n: torch.zeros(n, dtype=torch.int32, device="cuda")
        self.tensors = dict(processed=zeros(kernel.columns * padded), counts=zeros(kernel.columns * padded),
                            words=zeros(words // 4), sampling=zeros(kernel.columns * 18), rows=kernel.rows,
                            stopped=zeros(1))
        self.logprobs = torch.zeros(kernel.columns * 168, dtype=torch.uint8).pin_memory()

    def run(self, rows, steps, temperature=0.0, top_p=1.0, top_k=0, logprobs=None, frequency_penalty=0.0):
        """Tokens [steps][columns]."""
        k = self.kernel
        sampling = b"".join(
            struct.pack("<3f3I3f5I2Q", temperature, top_p, 0.0, top_k, 7 + slot, 0, 1.0, 0.0, frequency_penalty,
                        int(logprobs is not None), logprobs or 0, 0, 0, 0, 0, 0)
            for slot in range(k.columns))
        self.tensors["sampling"].copy_(torch.frombuffer(bytearray(sampling), dtype=torch.int32))
        self.tensors["counts"].zero_()
        with k.timed(rows, steps):
            for step in range(steps):
                k.enqueue(len(rows), 1, 3, stopped=self.tensors["stopped"] if step else None)
                base = k.host.data_ptr()
                pointers = [k.logits.data_ptr()] + [tensor.data_ptr() for tensor in self.tensors.values()]
                pointers += [base + 1024 + step * k.columns * 8, self.logprobs.data_ptr(), base + 64, base + 64, base]
                enqueue(self.function, SAMPLER_BLOCKS, self.threads, 0,
                        struct.pack("<12Q4I", *pointers, len(rows), step + 1, step, 0))
        return k.tokens(steps)


def decoding(token, position, slot=0, row=0, **more):
    return dict(token=token, position=position, slot=slot, first_row=row, first_position=position, **more)


def prompt_of(shape, length, seed=7):
    return torch.randint(0, shape.vocab - 1, (length,), generator=torch.Generator().manual_seed(seed))


def deviation(shape):
    return 0.08 if shape.hidden < 1000 else 0.02


def relative(a, b):
    return float((a - b).norm() / b.norm())


def check(args):
    """Logits against torch; the same bits for passes of 1, 5 and 8 rows, for several steps with another row beside, and
    where many pages are merged."""
    for name in args.shapes:
        shape, n = Shape(**SHAPES[name]), 150
        model, tokens = Model(shape, deviation(shape), positions=5120), prompt_of(shape, n)
        one, eight = (Kernel(model, columns, cubin(args, name, columns, args.name)) for columns in NARROW)
        exact, rounded = model.reference(tokens.cuda(), False)[-1], model.reference(tokens.cuda())[-1]
        token, logits = one.prompt(tokens)
        same = [
            torch.equal(logits, eight.prompt(tokens)[1]),
            torch.equal(logits, eight.prompt(tokens, slot=3, chunk=5)[1])
        ]
        steps = one.launch([decoding(token, n)], steps=6)[:, 0].tolist()
        last = one.logits[0, : shape.vocab].clone()
        beside = eight.launch([decoding(token, n), decoding(token, n, slot=3, row=1, last=n + 3)], steps=6)
        same += [
            torch.equal(last, eight.logits[0, :shape.vocab]), beside[:, 0].tolist() == steps,
            beside[:4, 1].tolist() == steps[:4], beside[4:, 1].tolist() == [0xFFFFFFFF] * 2
        ]
        one.launch([decoding(token, n)], steps=20, stop=1)
        ran, long_one = one.ran, Kernel(model, 1, cubin(args, name, 1, args.name), pages=640)
        long_eight = Kernel(model, 8, cubin(args, name, 8, args.name), pages=640, beside=long_one)
        long_one.kv.normal_(0, 0.5)
        long_one.k_scale.uniform_(0.5, 1.5)
        for position in (1023, 1024, 2100, 5000):
            long_one.launch([decoding(token, position)], steps=3)
            long_eight.launch([decoding(token, position), decoding(token, position // 2, slot=3, row=1)], steps=3)
            same.append(torch.equal(long_one.logits[0, : shape.vocab], long_eight.logits[0, : shape.vocab]))
        print(
            f"{name}: {relative(logits, rounded):.2e} from fp32 with the same roundings "
            f"({relative(rounded, exact):.2e} by roundings alone); same bits and tokens: {same}; stopped after {ran}",
            flush=True)


def bits(args):
    """The same bits on every grid, beside NaN, and in 200 repeats beside others."""
    for name in args.shapes:
        base = None
        for blocks in GRIDS:
            model = Model(Shape(**SHAPES[name], blocks=blocks), 0.08)
            s, n = model.shape, 100
            nan, tokens = s.vocab - 1, prompt_of(s, n)
            model.embedding[nan] = float("nan")
            for columns in NARROW:
                kernel = Kernel(model, columns, cubin(args, name, columns, args.name, blocks))
                token, logits = kernel.prompt(tokens)
                out = kernel.launch([decoding(token, n)], steps=5)[:, 0].tolist()
                got = (logits, kernel.logits[0, : s.vocab].clone(), out)
                base = base or got
                print(
                    f"{name}, {blocks} blocks, {columns} columns: "
                    f"{[torch.equal(got[0], base[0]), torch.equal(got[1], base[1]), out == base[2]]}",
                    flush=True)
            if blocks != 128:
                continue
            wrong = 0
            for batch, place in [(b, p) for b in range(2, 9) for p in {0, b // 2, b - 1}]:
                others = iter(range(1, 8))
                rows = [
                    decoding(token, n, 0, i) if i == place else decoding(nan, i * 7, next(others), i)
                    for i in range(batch)
                ]
                out = kernel.launch(rows, steps=5)[:, place].tolist()
                wrong += not (torch.equal(kernel.logits[place, : s.vocab], base[1]) and out == base[2])
            for repeat in range(200):
                kernel.launch([decoding(token, n)] +
                              [decoding(5 + repeat, 30 + repeat % 60, i, i) for i in range(1, 8)], steps=5)
                wrong += not torch.equal(kernel.logits[0, : s.vocab], base[1])
            print(f"{name}: wrong beside NaN or others: {wrong}", flush=True)


def alike(a, b):
    """The same logits; a row that sampled the token of NaN has nothing else."""
    return torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30))


def wide(args):
    """Rows of wide passes have the bits of narrow ones, whatever is beside them: prompts, decode, several steps,
    stops."""
    for name in args.shapes:
        shape = Shape(**SHAPES[name])
        model, slots, steps = Model(shape, deviation(shape), plain=False, positions=args.longest + 64), 64, 5
        nan = shape.vocab - 1
        if not shape.tied:
            model.embedding[nan] = float("nan")
        lengths = torch.randint(1, args.longest, (slots,), generator=torch.Generator().manual_seed(11)).tolist()
        lengths[:4] = [1, 64, 65, args.longest]
        prompts = {slot: prompt_of(shape, length, slot) for slot, length in enumerate(lengths)}
        # the last are for the rows of NaN
        room = dict(slots=slots + 32, pages=(slots + 32) * ((max(lengths) + 64) // PAGE + 1))
        narrow = Kernel(model, 8, cubin(args, name, 8, args.name), **room)
        want = narrow.prompts(prompts)
        decoded = {}
        for first in range(0, slots, 8):
            rows = [
                decoding(want[slot][0], lengths[slot], slot, i, last=lengths[slot] + (2 if slot % 5 == 0 else 99))
                for i, slot in enumerate(range(first, first + 8))
            ]
            out = narrow.launch(rows, steps)
            for i in range(8):
                decoded[first + i] = out[:, i].tolist(), narrow.logits[i, : shape.vocab].clone()

        def compare(kernel, order, what, steps=steps, stop=0):
            of_slot = lambda slot, i: decoding(want[slot][0], lengths[slot], slot, i,
                                               last=lengths[slot] + (2 if slot % 5 == 0 else 99))
            rows = [decoding(nan, 3, slots + i, i) if slot is None else of_slot(slot, i)
                    for i, slot in enumerate(order)]
            out = kernel.launch(rows, steps, stop=stop)
            tokens = sum(out[:kernel.ran, i].tolist() != decoded[slot][0][:kernel.ran] for i, slot in enumerate(order)
                         if slot is not None)
            logits = sum(not alike(kernel.logits[i, :shape.vocab], decoded[slot][1]) for i, slot in enumerate(order)
                         if slot is not None and slot % 5)
            print(
                f"{name}, {kernel.columns} columns, {what}: {tokens} rows with other tokens" +
                (f", {logits} with other logits" if kernel.ran == 5 else "") +
                f" of {len(order)}, {kernel.ran} steps, {kernel.ms:.2f} ms", flush=True)

        for columns in WIDE:
            if columns not in args.columns:
                continue
            kernel = Kernel(model, columns, cubin(args, name, columns, args.name), **room)
            got = kernel.prompts(prompts)
            wrong = [
                slot for slot in range(slots)
                if got[slot][0] != want[slot][0] or not torch.equal(got[slot][1], want[slot][1])
            ]
            print(f"{name}, {columns} columns: prompts with other bits: {wrong}", flush=True)
            mixed = torch.randperm(slots, generator=torch.Generator().manual_seed(5)).tolist()
            compare(kernel, mixed[:columns], "all different positions")
            compare(kernel, mixed[: columns // 2 + 1], "a part of the columns")
            compare(kernel, [slot if slot % 3 else None for slot in mixed[: columns // 2]], "beside NaN")
            compare(kernel, mixed[:columns], "told to stop", steps=20, stop=1)
            repeat = lambda: kernel.launch(
                [decoding(5, lengths[slot], slot, i) for i, slot in enumerate(mixed[:columns])], 3)
            first = repeat()
            differ = sum(not torch.equal(repeat(), first) for _ in range(args.repeats))
            print(f"{name}, {columns} columns: repeats that differ: {differ} of {args.repeats}", flush=True)


WARM_SECONDS = 2.0


def time_(args):
    """Medians of launches of 64 steps; variants in turns, on a GPU that is warm: a cool one is up to 2 % faster. Clocks
    drift for all alike, so each is compared with the first variant round by round."""
    for name in args.shapes:
        contexts = args.context.split(",")
        model = Model(Shape(**SHAPES[name]), plain=False,
                      positions=max(2048, *(max(lengths_of(c, 64)) for c in contexts)) + 128)
        for columns in args.columns:
            for context in contexts:
                slots = max(8, columns)
                lengths = lengths_of(context, columns)
                kernels = {}
                for variant in args.variants.split(","):
                    kernels[variant] = Kernel(model, columns, cubin(args, name, columns, variant),
                                              pages=slots * ((max(lengths) + 127) // PAGE + 1), slots=slots,
                                              beside=next(iter(kernels.values()), None))
                next(iter(kernels.values())).kv.normal_(0, 0.2)
                begun = time.monotonic()
                while time.monotonic() - begun < WARM_SECONDS:
                    for kernel in kernels.values():
                        timed_steps(kernel, lengths)
                times, turns = {variant: [] for variant in kernels}, list(kernels)
                for _ in range(args.rounds):
                    for variant in turns:
                        times[variant].append(timed_steps(kernels[variant], lengths))
                    turns.append(turns.pop(0))
                first = next(iter(times.values()))
                for variant, ms in times.items():
                    ratios = sorted(a / b for a, b in zip(ms, first))
                    report_time(model.shape, model.bytes, f"{name} {variant or 'plain':10}", columns, context, lengths,
                                sorted(ms), 100 * (ratios[len(ratios) // 2] - 1))


STEPS = 64


def lengths_of(context, columns):
    """Positions of each row before the launch: a number, for all; `mixed`, as `looplane bench --batch 1,8,32,64
    --context 512` comes to them; `random`, 100 to 2000."""
    if context == "mixed":
        return ([776] + 7 * [646] + 24 * [516] + 32 * [386])[:columns]
    if context == "random":
        return torch.randint(100, 2001, (columns,), generator=torch.Generator().manual_seed(2)).tolist()
    return columns * [int(context)]


def timed_steps(kernel, lengths):
    """ms of a step."""
    kernel.launch([decoding(17 + i, length - 1, i, i) for i, length in enumerate(lengths)], STEPS, logits=False)
    return kernel.ms / STEPS


def report_time(shape, weight_bytes, what, columns, context, lengths, ms, slower):
    """slower: than the first variant, percent."""
    middle, spread = ms[len(ms) // 2], f"{ms[0]:.3f} to {ms[-1]:.3f}; {slower:+.2f} %"
    positions = sum(length + STEPS / 2 for length in lengths)
    moved = weight_bytes + shape.layers * shape.kv_heads * shape.head_dim * 4 * positions
    rate = moved / middle / 1e6
    print(
        f"{what} batch {columns} context {context}: {middle:.3f} ms ({spread}), {rate:.0f} GB/s, "
        f"{100 * rate / LIMIT_GBS:.1f} % of {LIMIT_GBS}",
        flush=True)


SETTINGS = {
    "greedy": {}, "temperature 0.8": dict(temperature=0.8), "top_p 0.9": dict(temperature=0.8, top_p=0.9),
    "top_k 40, top_p 0.9": dict(temperature=0.8, top_p=0.9, top_k=40),
    "penalty": dict(temperature=0.8, frequency_penalty=0.5),
    "greedy, 20 logprobs": dict(logprobs=20), "top_p 0.9, 20 logprobs": dict(temperature=0.8, top_p=0.9, logprobs=20)
}


def chain(args):
    """Milliseconds a step: greedy in the loop, and chains of steps that the sampler draws. Greedy chains must give the
    tokens of the loop."""
    context, steps = int(args.context), 64
    for name in args.shapes:
        model = Model(Shape(**SHAPES[name]), plain=False, positions=context + 128)
        for columns in args.columns:
            kernel = Kernel(model, columns, cubin(args, name, columns, args.name),
                            pages=columns * ((context + 127) // PAGE + 1), slots=columns)
            kernel.kv.normal_(0, 0.2)
            chained = Chain(kernel, cubin(args, name, "sampler", args.name))
            rows = [decoding(17 + i, context - 1, i, i) for i in range(columns)]
            looped = [(kernel.launch(rows, steps, logits=False), kernel.ms / steps) for _ in range(5)]
            loop = sorted(ms for _, ms in looped)[2]
            print(f"{name}, batch {columns}, in the loop: {loop:.4f} ms", flush=True)
            for setting, sampling in SETTINGS.items():
                runs = [(chained.run(rows, steps, **sampling), kernel.ms / steps) for _ in range(5)]
                ms, same = sorted(ms for _, ms in runs)[2], all(torch.equal(runs[0][0], tokens) for tokens, _ in runs)
                told = f"repeats alike: {same}"
                if not sampling:
                    told = f"tokens of the loop: {torch.equal(runs[0][0], looped[0][0])}"
                print(
                    f"{name}, batch {columns}, {setting}: {ms:.4f} ms, {100 * (ms / loop - 1):+.2f} %, "
                    f"{1000 * (ms - loop):+.1f} us; {told}",
                    flush=True)


def trace(args):
    """Means of the stages of a layer, of a build with -DLP_TRACE named `trace`."""
    for name in args.shapes:
        context, batch = int(args.context), args.batch
        slots = max(8, batch)
        model = Model(Shape(**SHAPES[name]), plain=False, positions=context + 128)
        kernel = Kernel(model, batch, cubin(args, name, batch, "trace"), pages=slots * ((context + 127) // PAGE + 1),
                        slots=slots)
        kernel.kv.normal_(0, 0.2)
        stamps = torch.zeros(model.shape.blocks, kernel.threads // 32, model.shape.layers + 1, 16, dtype=torch.int64,
                             device="cuda")
        rows = [decoding(17 + i, context - 1, i, i) for i in range(batch)]
        for _ in range(3):
            kernel.launch(rows, steps=8, logits=False, trace=stamps)
        consumers = 16 if batch in NARROW else 8
        notes = stamps[:, 16 if batch in NARROW else 8, -1].double().cpu()  # clock and time at either end (note_time)
        mhz = float(((notes[:, 10] - notes[:, 8]) * 1e3 / (notes[:, 11] - notes[:, 9])).mean())
        # from the launch's begin: a double has room for little more
        microseconds = (stamps[:, :consumers, 2:-2] -
                        stamps[0, 16 if batch in NARROW else 8, -1, 9]).double().cpu() / 1e3
        stages = ["wait for x", "qkv", "attend", "merge", "wait for o's input", "o", "wait for x", "gate/up", "down"]
        if batch not in NARROW:
            stages = [
                "qkv with wait", "exchanged", "q, k, v written", "attend", "o with wait, exchanged", "published",
                "gate/up with wait", "published, down with wait, exchanged", "published"
            ]
        between = lambda i, j: f"{(microseconds[..., j] - microseconds[..., i]).mean():.2f}"
        print(f"{name}, batch {batch}, {mhz:.0f} MHz: " +
              ", ".join(f"{stage} {between(i, i + 1)}" for i, stage in enumerate(stages)))
        if batch not in NARROW:
            print(
                f"    q, k, v: norm there {between(2, 12)}, written {between(12, 3)}; "
                f"attend: items {between(3, 11)}, published {between(11, 4)}"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["build", "check", "bits", "wide", "time", "chain", "trace"])
    parser.add_argument("shapes", nargs="+", choices=[*SHAPES, "small", "fit"])
    parser.add_argument("--dir", default=".", help="where the .cubin files are")
    parser.add_argument("--name", default="", help="of the variant to build, or to check")
    parser.add_argument("--defines", default="", help="for nvcc")
    parser.add_argument("--grids", nargs="*", default=[], help="shapes to build for all grids, which `bits` wants")
    parser.add_argument("--variants", default="", help="names to time, by commas; an empty one is the plain build")
    parser.add_argument("--context", default="512", help="positions; of `time` also: mixed, random (lengths_of)")
    parser.add_argument("--rounds", type=int, default=9, help="of `time`: an odd number")
    parser.add_argument("--columns", default="1,8,32,64", help="of the kernels to build, to compare or to time")
    parser.add_argument("--longest", type=int, default=300, help="prompt of `wide`")
    parser.add_argument("--repeats", type=int, default=50, help="of `wide`")
    parser.add_argument("--batch", type=int, default=1, choices=COLUMNS)
    args = parser.parse_args()
    args.shapes = [
        name for shape in args.shapes for name in (SMALL if shape == "small" else FIT if shape == "fit" else [shape])
    ]
    args.columns = [int(columns) for columns in args.columns.split(",")]
    if args.action != "build":
        gpu()
    actions = {"build": build, "check": check, "bits": bits, "wide": wide, "time": time_, "chain": chain,
               "trace": trace}
    actions[args.action](args)


if __name__ == "__main__":
    main()
