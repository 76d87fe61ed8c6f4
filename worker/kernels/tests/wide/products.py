"""Products of wide passes alone (products.cu): what gate and up, qkv, o and down of a layer take, without exchanges.

    products.py build target/products                          # needs NVRTC (LOOPLANE_NVRTC), no GPU
    products.py build target/products --formats int4 --rows 32 before=../before/worker/kernels
    products.py run target/products                            # needs a GPU and nothing but this file

`build` compiles the kernels of this tree, and of others by name; `run` times all of them in turns, the best of some
rounds: microseconds a layer, and clocks of its consumer warps in the mean. Weights and activations are zeros, which
takes less power.
"""
import argparse, ctypes, glob, os, re, struct, sys

KERNELS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PRODUCTS = ["gate/up", "qkv", "o", "down"]
FORMATS = {"bf16": (0, 0), "fp8": (1, 0), "fp8-blocks": (2, 128), "int4": (3, 128), "int4-zeros": (4, 128)}
SHAPES = {  # layers to stream, hidden, heads, KV heads, head_dim, intermediate
    "8b": (8, 4096, 32, 8, 128, 14336),
    "70b": (2, 8192, 64, 8, 128, 28672),
    "3b": (8, 3072, 24, 8, 128, 8192),
    "qwen2.5-7b": (8, 3584, 28, 4, 128, 18944),
    "qwen3-0.6b": (8, 1024, 16, 8, 128, 3072),
    "qwen3-1.7b": (8, 2048, 16, 8, 128, 6144),
    "qwen3-4b": (8, 2560, 32, 8, 128, 9728),
    "qwen2.5-1.5b": (8, 1536, 12, 2, 128, 8960),
    "qwen2.5-3b": (8, 2048, 16, 2, 128, 11008),
    "llama-1b": (8, 2048, 32, 8, 64, 8192),
}
BLOCKS = 128
OPTIONS = ["--gpu-architecture=sm_90a", "-std=c++17", "--fmad=false", "--device-as-default-execution-space",
           "--ptxas-options=-v", "--no-cache"]


def nvrtc():
    path = os.environ.get("LOOPLANE_NVRTC") or sys.exit("LOOPLANE_NVRTC names no libnvrtc.so (.ci/nvrtc installs one)")
    for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so*")):
        ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(path)


def text_of(library, name, program):
    """A text, or bytes, that NVRTC has of a program: its log, its binary."""
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{name}")(program, buffer)
    return buffer.raw


def compile_products(library, kernels, shape, fmt, rows, product):
    """The binary, and how many bytes of registers it spills."""
    layers, hidden, heads, kv_heads, head_dim, intermediate = SHAPES[shape]
    number, group = FORMATS[fmt]
    defines = dict(
        LAYERS=layers, HIDDEN=hidden, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HEAD_WIDTH=head_dim,
        INTERMEDIATE=intermediate, VOCAB=2048, TIED=0, QKV_BIAS=0, QK_NORM=0, WINDOW=0, RANKS=1, SHARDS=1,
        EPS=0x3727C5AC, LAYER_FORMAT=number, GROUP=group, BLOCKS=BLOCKS, COLUMNS=rows, PRODUCT=product)
    with open(os.path.join(KERNELS, "tests/wide/products.cu")) as file:
        source = "".join(f"#define LP_{name} {value}u\n" for name, value in defines.items()) + file.read()
    names = [os.path.relpath(path, kernels) for path in glob.glob(f"{kernels}/*/*.cuh")]
    texts = [open(os.path.join(kernels, name), "rb").read() for name in names]
    strings = lambda values: (ctypes.c_char_p * len(values))(*values)
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"products.cu", len(names), strings(texts),
                               strings([name.encode() for name in names]))
    failed = library.nvrtcCompileProgram(program, len(OPTIONS), strings([option.encode() for option in OPTIONS]))
    log = text_of(library, "ProgramLog", program).rstrip(b"\0").decode()
    if failed:
        sys.exit(log)
    return text_of(library, "CUBIN", program), int(re.search(r"(\d+) bytes spill stores", log)[1])


def build(args):
    library = nvrtc()
    os.makedirs(args.dir, exist_ok=True)
    variants = [("tree", KERNELS)] + [variant.split("=", 1) for variant in args.variants]
    for fmt in args.formats.split(","):
        for rows in map(int, args.rows.split(",")):
            for product, name in enumerate(PRODUCTS):
                for variant, kernels in variants:
                    binary, spilled = compile_products(library, kernels, args.shape, fmt, rows, product)
                    file = "-".join([args.shape, fmt, str(rows), name.replace("/", "+"), variant])
                    with open(os.path.join(args.dir, file + ".cubin"), "wb") as out:
                        out.write(binary)
                    print(f"{file}: {spilled} bytes spilled")


class Driver:
    """What is used of CUDA's driver, whose errors end the program."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *args):
        error = getattr(self.library, name)(*args)
        if error:
            sys.exit(f"{name} failed with {error}")

    def zeros(self, size):
        memory = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        self.call("cuMemsetD8_v2", memory, 0, ctypes.c_size_t(size))
        return memory.value


def run(args):
    driver = Driver()
    weights, words, tokens, other = (driver.zeros(size) for size in (6 << 30, 64 << 20, 1 << 20, 4096))
    begun, ended = ctypes.c_void_p(), ctypes.c_void_p()
    for event in (begun, ended):
        driver.call("cuEventCreate", ctypes.byref(event), 0)
    kernels = {}
    for path in sorted(glob.glob(os.path.join(args.dir, "*.cubin"))):
        module, function, needs, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
        driver.call("cuModuleLoadData", ctypes.byref(module), open(path, "rb").read())
        driver.call("cuModuleGetFunction", ctypes.byref(function), module, b"products")
        driver.call("cuModuleGetGlobal_v2", ctypes.byref(needs), ctypes.byref(size), module, b"products_needs")
        values = (ctypes.c_uint64 * 2)()
        driver.call("cuMemcpyDtoH_v2", values, needs, ctypes.c_size_t(16))
        driver.call("cuFuncSetAttribute", function, 8, int(values[0]))
        kernels[os.path.basename(path)[:-6]] = (function, int(values[0]), int(values[1]))
    best = {}
    for name in list(kernels) * args.rounds:
        function, shared, threads = kernels[name]
        layers = SHAPES[next(shape for shape in SHAPES if name.startswith(shape + "-"))][0]
        # Launch in layout/launch.cuh: 20 pointers, 8 numbers, 16 inboxes.
        pointers = [weights, 0, 0, 0, 0, 0, 0, 0, 0, words, 0, other, 0, 0, 0, 0, tokens, other, other, 0]
        launch = struct.pack("<20Q8I16Q", *pointers, 0, layers, *[0] * 6, *[0] * 16)
        buffer = ctypes.create_string_buffer(launch, len(launch))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        driver.call("cuEventRecord", begun, None)
        driver.call("cuLaunchKernel", function, BLOCKS, 1, 1, threads, 1, 1, shared, None, parameters, None)
        driver.call("cuEventRecord", ended, None)
        driver.call("cuCtxSynchronize")
        ms = ctypes.c_float()
        driver.call("cuEventElapsedTime", ctypes.byref(ms), begun, ended)
        clocks = (ctypes.c_uint64 * (BLOCKS * 8))()
        driver.call("cuMemcpyDtoH_v2", clocks, ctypes.c_uint64(tokens), ctypes.c_size_t(ctypes.sizeof(clocks)))
        found = (ms.value * 1000 / layers, sum(clocks) / len(clocks))
        best[name] = min(best.get(name, found), found)
    print("| product | us a layer | clocks |\n|---|---|---|")
    for name, (us, clocks) in best.items():
        print(f"| {name} | {us:.1f} | {clocks:.0f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_build = commands.add_parser("build")
    of_build.add_argument("dir")
    of_build.add_argument("variants", nargs="*", metavar="NAME=KERNELS", help="other kernels to compare with")
    of_build.add_argument("--shape", default="8b", choices=SHAPES)
    of_build.add_argument("--formats", default="bf16,fp8,int4")
    of_build.add_argument("--rows", default="32,64")
    of_build.set_defaults(command=build)
    of_run = commands.add_parser("run")
    of_run.add_argument("dir")
    of_run.add_argument("--rounds", type=int, default=8)
    of_run.set_defaults(command=run)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
