"""Tensor parallelism, one rank a GPU or a range of blocks of one GPU: the same bits as one rank, and times.

    ranks.py build wide --ranks 2,4,8,16                # for `bits`: ranks as ranges of blocks of one launch
    ranks.py bits wide --ranks 2,4,8,16
    ranks.py build 8b --ranks 2,4 --apart; ranks.py time 8b --ranks 2,4 --apart     # a GPU each, in one process
"""
import argparse, contextlib, ctypes, os

import variants
from variants import (NARROW, SHAPES, Kernel, Model, Shape, checked, compile_cubin, decoding, deviation, enqueue,
                      kernel_of, prompt_of)

BLOCKS, ROUNDS, STEPS = 128, 9, 128


def cubin(args, name, columns, ranks):
    apart = f"_apart{blocks_of(args, ranks)}" if args.apart else ""
    return os.path.join(args.dir, f"{name}_{columns}_tp{ranks}{apart}{args.name and '_' + args.name}.cubin")


def blocks_of(args, ranks):
    return (args.blocks or BLOCKS) if args.apart else BLOCKS // ranks


def build(args):
    for name in args.shapes:
        for ranks in args.ranks:
            shape = Shape(**SHAPES[name]).of_rank(ranks, blocks_of(args, ranks))
            for columns in args.columns:
                compile_cubin(
                    cubin(args, name, columns, ranks), f"{kernel_of(columns)}.cu",
                    [*shape.defines(columns), f"-DLP_RANKS_HERE={1 if args.apart else ranks}", *args.defines.split()])


class Group:
    """Kernels of all ranks, which are launched together. `apart`: on a GPU each. `beside`: a group with the same pages,
    whose KV it uses."""

    def __init__(self, models, columns, path, apart, beside=None, **sizes):
        self.apart, self.kernels = apart, []
        for rank, model in enumerate(models):
            with self.on(rank):
                self.kernels.append(Kernel(model, columns, path, beside=beside and beside.kernels[rank], **sizes))
        for rank, kernel in enumerate(self.kernels):
            kernel.rank, kernel.inboxes = rank, [peer.inbox for peer in self.kernels]

    def on(self, rank):
        return variants.torch.cuda.device(rank) if self.apart else contextlib.nullcontext()

    def launch(self, rows, steps=1, logits=True):
        """Tokens of rank 0, which all ranks must agree with."""
        self.each(lambda kernel: kernel.prepare(rows, steps))
        if self.apart:
            self.each(lambda kernel: kernel.enqueue(len(rows), steps, int(logits)))
        else:
            first = self.kernels[0]
            parameters = b"".join(kernel.parameter(len(rows), steps, int(logits)) for kernel in self.kernels)
            enqueue(first.function, first.model.shape.blocks * len(self.kernels), first.threads, first.shared,
                    parameters)
        self.each(Kernel.record)
        self.each(Kernel.finish)
        tokens = [kernel.tokens(steps) for kernel in self.kernels]
        assert all((of == tokens[0]).all() for of in tokens), "ranks drew different tokens"
        return tokens[0]

    def each(self, what):
        for rank, kernel in enumerate(self.kernels):
            with self.on(rank):
                what(kernel)

    def logits(self, row):
        """Of rank 0, which all ranks must have."""
        own = [kernel.logits[row, : kernel.model.shape.vocab].cpu() for kernel in self.kernels]
        assert all(variants.alike(of, own[0]) for of in own), "ranks have different logits"
        return own[0]

    @property
    def columns(self):
        return self.kernels[0].columns


def bits(args):
    """Prompts, several steps and rows beside others at each number of ranks, against one rank."""
    for name in args.shapes:
        whole, n = Shape(**SHAPES[name]), 150
        model, tokens = Model(whole, deviation(whole), positions=1024), prompt_of(whole, n)
        base = {}
        for ranks in (1, *args.ranks):
            shape = whole if ranks == 1 else whole.of_rank(ranks, blocks_of(args, ranks))
            shards = lambda: [Model(shape, positions=1024, of=model, rank=rank) for rank in range(ranks)]
            models = [model] if ranks == 1 else shards()

            def group_of(columns):
                alone = os.path.join(args.dir, f"{name}_{columns}.cubin")
                path = alone if ranks == 1 else cubin(args, name, columns, ranks)
                return Group(models, columns, path, args.apart and ranks > 1, slots=64, pages=64 * 4)

            for columns in args.columns:
                group = group_of(columns)
                got = [step_logits(group, tokens)]
                for rows in range(2, group.columns + 1, 3 if columns in NARROW else 10):
                    group.launch([decoding(int(tokens[i]), 0, i, i) for i in range(rows)], steps=4)
                    got.append([group.logits(i) for i in range(rows)])
                token = int(got[0][0].argmax())
                steps = group.launch([decoding(token, n)], steps=6)[:, 0].tolist()
                got.append([group.logits(0)])
                flat = [row for rows in got for row in rows]
                base.setdefault(columns, (flat, steps))
                first = base[columns]
                equal = [variants.torch.equal(a, b) for a, b in zip(flat, first[0])]
                print(
                    f"{name}, {ranks} ranks, {columns} columns: {sum(equal)} of {len(equal)} rows have the bits of one "
                    f"rank; the same tokens: {steps == first[1]}",
                    flush=True)


def step_logits(group, tokens):
    """Logits after a prompt."""
    for first in range(0, len(tokens), group.columns):
        part = tokens[first : first + group.columns].tolist()
        group.launch([
            dict(token=token, position=first + i, slot=0, first_row=0, first_position=first, sample=1)
            for i, token in enumerate(part)
        ])
    return [group.logits(len(part) - 1)]


def time_(args):
    """Medians of launches, variants in turns; weights of every rank are made up."""
    for name in args.shapes:
        for ranks in args.ranks:
            shape, context = Shape(**SHAPES[name]).of_rank(ranks, blocks_of(args, ranks)), 512
            group_models = []
            for rank in range(ranks):
                with variants.torch.cuda.device(rank if args.apart else 0):
                    group_models.append(Model(shape, plain=False, positions=1024, rank=rank))
            for columns in args.columns:
                groups, times = {}, {}
                sizes = dict(pages=max(8, columns) * 10, slots=max(8, columns))
                for variant in args.variants.split(","):
                    args.name, times[variant] = variant, []
                    groups[variant] = Group(group_models, columns, cubin(args, name, columns, ranks), args.apart,
                                            **sizes)
                for turn in range(ROUNDS + 2):
                    for variant, group in groups.items():
                        ms = timed_steps(group, context)
                        if turn > 1:  # the first ones warm up
                            times[variant].append(ms)
                position_bytes = shape.layers * shape.kv_heads * shape.head_dim * 4
                moved = group_models[0].bytes + position_bytes * columns * (context + STEPS / 2)
                floor = moved / variants.LIMIT_GBS / 1e6
                for variant, ms in times.items():
                    ms = sorted(ms)
                    print(
                        f"{name} {variant or 'plain':8} tp {ranks} batch {columns}: {ms[ROUNDS // 2]:.3f} ms "
                        f"({ms[0]:.3f} to {ms[-1]:.3f}), floor {floor:.3f}, {100 * floor / ms[ROUNDS // 2]:.1f} %",
                        flush=True)
                del groups


def timed_steps(group, context):
    """ms of a step."""
    group.launch([decoding(17 + i, context - 1, i, i) for i in range(group.columns)], steps=STEPS, logits=False)
    return max(kernel.ms for kernel in group.kernels) / STEPS


def open_peers(ranks):
    """Lets every GPU read and write the memory of the others."""
    driver, contexts = variants.driver, []
    for device in range(ranks):
        variants.torch.zeros(1, device=f"cuda:{device}")
        context = ctypes.c_void_p()
        checked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        contexts.append(context)
    for device in range(ranks):
        checked(driver.cuCtxSetCurrent(contexts[device]), "cuCtxSetCurrent")
        for peer in range(ranks):
            # 704: already
            if peer != device and (result := driver.cuCtxEnablePeerAccess(contexts[peer], 0)) not in (0, 704):
                checked(result, "cuCtxEnablePeerAccess")
    checked(driver.cuCtxSetCurrent(contexts[0]), "cuCtxSetCurrent")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["build", "bits", "time"])
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--dir", default=".", help="where the .cubin files are")
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--columns", default="1,8")
    parser.add_argument("--blocks", type=int, help="of a GPU, with --apart")
    parser.add_argument("--apart", action="store_true", help="a GPU for every rank")
    parser.add_argument("--name", default="", help="of the variant to build")
    parser.add_argument("--variants", default="", help="names to time, by commas; an empty one is the plain build")
    parser.add_argument("--defines", default="", help="for nvcc")
    args = parser.parse_args()
    args.ranks, args.columns = ([int(n) for n in of.split(",")] for of in (args.ranks, args.columns))
    if args.action != "build":
        variants.gpu()
        if args.apart:
            open_peers(max(args.ranks))
    {"build": build, "bits": bits, "time": time_}[args.action](args)


if __name__ == "__main__":
    main()
