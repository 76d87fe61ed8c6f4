// CUDA's driver as far as the worker uses it, on a machine without a GPU: for the host's side of launches.
//
// It has one H200. Memory is the host's, and zero: copies of up to 1 MiB are made, larger ones only checked. Kernels
// are found in their cubins and do nothing; what they need and the numbers that they tell are read there, too. A word
// of the mailbox that is expected holds the complement of a tag (launches/mailbox.rs), and becomes the tag with token
// 1, so that no wait is in vain.
//
// What a driver refuses, or does not notice, ends a call with an error here and a line on standard error: memory that
// is not wholly in one allocation, what was given back, a launch that its kernel cannot have. LOOPLANE_DRIVER_SHORT, a
// negative control, counts a byte less of each allocation. LOOPLANE_DRIVER_LAUNCHED names a file to which each
// kernel's name is appended when it is launched first.
#define _GNU_SOURCE
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int Result;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 101, NOT_FOUND = 500 };
enum { MULTIPROCESSORS = 132, SHARED_BYTES = 232448, SHARED_UNASKED = 48 << 10, MADE_BYTES = 1 << 20 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Result refused(const char *what, const void *at, size_t bytes) {
    fprintf(stderr, "driver: %s: %zu bytes at %p\n", what, bytes, at);
    return INVALID;
}

// ---- memory ----

struct Allocation {
    char *base;
    size_t bytes;
    int pinned;  // of the host, which a kernel's answers come into
};
static struct Allocation allocations[1 << 16];
static int allocation_count;

static struct Allocation *holding(const void *at, size_t bytes) {
    for (int i = 0; i < allocation_count; i++) {
        struct Allocation *of = &allocations[i];
        size_t has = of->bytes - (getenv("LOOPLANE_DRIVER_SHORT") ? 1 : 0);
        if (of->base && (char *)at >= of->base && (char *)at + bytes <= of->base + has) return of;
    }
    return NULL;
}

static Result take(void **at, size_t bytes, int pinned) {
    char *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!bytes || base == MAP_FAILED) return NO_MEMORY;
    pthread_mutex_lock(&lock);
    int place = 0;
    while (place < allocation_count && allocations[place].base) place++;
    if (place < (int)(sizeof allocations / sizeof *allocations)) {
        allocations[place] = (struct Allocation){base, bytes, pinned};
        if (place == allocation_count) allocation_count++;
        *at = base;
    }
    pthread_mutex_unlock(&lock);
    return *at == base ? OK : NO_MEMORY;
}

static Result give_back(void *base, int pinned) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < allocation_count && !found; i++)
        if (base && allocations[i].base == base && allocations[i].pinned == pinned) {
            munmap(base, allocations[i].bytes);
            allocations[i].base = NULL;
            found = 1;
        }
    pthread_mutex_unlock(&lock);
    return found ? OK : refused("given back, but not taken", base, 0);
}

static Result is_device(const char *what, const void *at, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct Allocation *of = holding(at, bytes);
    pthread_mutex_unlock(&lock);
    return of || !bytes ? OK : refused(what, at, bytes);
}

/// Whatever is expected has come.
static void answer(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < allocation_count; i++) {
        if (!allocations[i].base || !allocations[i].pinned || allocations[i].bytes > MADE_BYTES) continue;
        uint64_t *words = (uint64_t *)allocations[i].base;
        for (size_t k = 0; k < allocations[i].bytes / 8; k++) {
            uint64_t tag = ~words[k] >> 32;
            if ((uint32_t)words[k] == 0 && words[k] >> 63 && tag) words[k] = tag << 32 | 1;
        }
    }
    pthread_mutex_unlock(&lock);
}

Result cuMemAlloc_v2(uint64_t *at, size_t bytes) { return take((void **)at, bytes, 0); }
Result cuMemFree_v2(uint64_t at) { return give_back((void *)at, 0); }
Result cuMemHostAlloc(void **at, size_t bytes, unsigned flags) { return take(at, bytes, 1); }
Result cuMemFreeHost(void *at) { return give_back(at, 1); }
Result cuMemHostGetDevicePointer_v2(uint64_t *to, void *at, unsigned flags) {
    *to = (uint64_t)at;
    return is_device("a mapped address", at, 1);
}
Result cuMemGetInfo_v2(size_t *unused, size_t *all) {
    *all = 139ull << 30;
    *unused = *all - (1ull << 30);
    return OK;
}
Result cuMemsetD8_v2(uint64_t at, unsigned char byte, size_t bytes) {
    Result result = is_device("a memset", (void *)at, bytes);
    if (result == OK && bytes <= MADE_BYTES) memset((void *)at, byte, bytes);
    return result;
}
Result cuMemsetD8Async(uint64_t at, unsigned char byte, size_t bytes, void *stream) {
    return stream ? cuMemsetD8_v2(at, byte, bytes) : refused("a memset without a stream", (void *)at, bytes);
}
static Result copy(const char *what, void *to, const void *from, const void *device, size_t bytes) {
    Result result = is_device(what, device, bytes);
    if (result == OK && bytes <= MADE_BYTES) memmove(to, from, bytes);
    return result;
}
Result cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    return copy("a copy to the GPU", (void *)to, from, (void *)to, bytes);
}
Result cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    return copy("a copy to the host", to, (void *)from, (void *)from, bytes);
}
Result cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    return cuMemcpyHtoD_v2(to, from, bytes);
}
Result cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    return cuMemcpyDtoH_v2(to, from, bytes);
}
Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    Result result = is_device("a copy out of the GPU", (void *)from, bytes);
    return result == OK ? copy("a copy within the GPU", (void *)to, (void *)from, (void *)to, bytes) : result;
}

// Memory by handles, which ranks of processes share: each process sees its own.
Result cuMemGetAllocationGranularity(size_t *bytes, const void *of, int which) {
    *bytes = 2 << 20;
    return OK;
}
Result cuMemCreate(uint64_t *handle, size_t bytes, const void *of, uint64_t flags) {
    *handle = 1;
    return OK;
}
Result cuMemRelease(uint64_t handle) { return OK; }
Result cuMemAddressReserve(uint64_t *at, size_t bytes, size_t alignment, uint64_t wish, uint64_t flags) {
    return take((void **)at, bytes, 0);
}
Result cuMemAddressFree(uint64_t at, size_t bytes) { return give_back((void *)at, 0); }
Result cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    return is_device("a mapping", (void *)at, bytes);
}
Result cuMemUnmap(uint64_t at, size_t bytes) { return is_device("a mapping that ends", (void *)at, bytes); }
Result cuMemSetAccess(uint64_t at, size_t bytes, const void *of, size_t count) {
    return is_device("access", (void *)at, bytes);
}
Result cuMemExportToShareableHandle(int *file, uint64_t handle, int type, uint64_t flags) {
    *file = memfd_create("memory of a GPU", 0);
    return *file < 0 ? NO_MEMORY : OK;
}
Result cuMemImportFromShareableHandle(uint64_t *handle, void *file, int type) {
    *handle = 1;
    return OK;
}

// ---- the GPU ----

Result cuInit(unsigned flags) { return OK; }
Result cuDriverGetVersion(int *version) {
    *version = 13000;
    return OK;
}
Result cuDeviceGetCount(int *count) {
    *count = 1;
    return OK;
}
Result cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? OK : NO_DEVICE;
}
Result cuDeviceGetName(char *name, int bytes, int device) {
    snprintf(name, bytes, "no GPU");
    return OK;
}
Result cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, device + 1, 16);
    return OK;
}
Result cuDeviceGetPCIBusId(char *id, int bytes, int device) {
    snprintf(id, bytes, "0000:%02x:00.0", device);
    return OK;
}
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 16: *value = MULTIPROCESSORS; break;
        case 75: *value = 9; break;  // compute capability 9.0
        case 76: *value = 0; break;
        case 97: *value = SHARED_BYTES; break;  // of a block that asks for it
        default: *value = 1;
    }
    return OK;
}
Result cuDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 1;
    return OK;
}
Result cuDeviceGetP2PAttribute(int *value, int attribute, int device, int peer) {
    *value = 1;
    return OK;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)1;
    return OK;
}
Result cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
Result cuCtxSetCurrent(void *context) { return OK; }
Result cuCtxSynchronize(void) {
    answer();
    return OK;
}
Result cuGetErrorName(int error, const char **name) {
    *name = "refused by the driver of tests";
    return OK;
}
Result cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

// ---- modules ----

struct Function {
    char name[128];
    unsigned threads, shared_bytes;  // of a block at most; of these dynamic ones
    int launched;
};

static char *section_of(char *image, const Elf64_Shdr *section) { return image + section->sh_offset; }
static Elf64_Shdr *sections(char *image) { return (Elf64_Shdr *)(image + ((Elf64_Ehdr *)image)->e_shoff); }
static int section_count(char *image) { return ((Elf64_Ehdr *)image)->e_shnum; }

static Elf64_Sym *symbol(char *image, const char *name) {
    for (int i = 0; i < section_count(image); i++) {
        Elf64_Shdr *table = sections(image) + i;
        if (table->sh_type != SHT_SYMTAB) continue;
        Elf64_Sym *symbols = (Elf64_Sym *)section_of(image, table);
        char *names = section_of(image, sections(image) + table->sh_link);
        for (size_t k = 0; k < table->sh_size / sizeof *symbols; k++)
            if (!strcmp(names + symbols[k].st_name, name)) return symbols + k;
    }
    return NULL;
}

Result cuModuleLoadData(void **module, const void *cubin) {
    const Elf64_Ehdr *header = cubin;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return refused("a module that is no cubin", cubin, 0);
    size_t end = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize,
           segments = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    if (segments > end) end = segments;
    char *image = malloc(end);
    if (!image) return NO_MEMORY;
    memcpy(image, cubin, end);
    *module = image;
    return OK;
}
Result cuModuleUnload(void *module) {
    free(module);
    return OK;
}
Result cuModuleGetFunction(void **function, void *module, const char *name) {
    char *image = module, wanted[256];
    if (!symbol(image, name)) return NOT_FOUND;
    struct Function *of = calloc(1, sizeof *of);
    if (!of) return NO_MEMORY;
    snprintf(of->name, sizeof of->name, "%s", name);
    of->threads = 1024, of->shared_bytes = SHARED_UNASKED;
    // The launch bounds: attribute 5 of those that a kernel's own section lists, three words.
    snprintf(wanted, sizeof wanted, ".nv.info.%s", name);
    char *names = section_of(image, sections(image) + ((Elf64_Ehdr *)image)->e_shstrndx);
    for (int i = 0; i < section_count(image); i++) {
        Elf64_Shdr *info = sections(image) + i;
        if (strcmp(names + info->sh_name, wanted)) continue;
        unsigned char *at = (unsigned char *)section_of(image, info), *end = at + info->sh_size;
        while (at + 4 <= end) {
            const unsigned bytes = at[0] == 4 ? at[2] | at[3] << 8 : 0;
            uint32_t most[3];
            if (at[0] == 4 && at[1] == 5 && bytes == sizeof most) {
                memcpy(most, at + 4, sizeof most);
                of->threads = most[0] * most[1] * most[2];
            }
            at += 4 + bytes;
        }
    }
    *function = of;
    return OK;
}
Result cuModuleGetGlobal_v2(uint64_t *at, size_t *bytes, void *module, const char *name) {
    char *image = module;
    Elf64_Sym *found = symbol(image, name);
    if (!found) return NOT_FOUND;
    // In memory of its own: whoever reads it is checked.
    const Elf64_Shdr *section = sections(image) + found->st_shndx;
    Result result = take((void **)at, found->st_size + 1, 0);
    if (result == OK && section->sh_type != SHT_NOBITS)
        memcpy((void *)*at, section_of(image, section) + found->st_value, found->st_size);
    *bytes = found->st_size;
    return result;
}
Result cuFuncSetAttribute(void *function, int attribute, int value) {
    struct Function *of = function;
    if (attribute == 8) of->shared_bytes = value;
    return value >= 0 && value <= SHARED_BYTES ? OK : refused("shared memory", of->name, value);
}
Result cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? (int)((struct Function *)function)->threads : attribute == 11;  // clusters of one
    return OK;
}
Result cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
    *clusters = MULTIPROCESSORS;
    return OK;
}

// ---- launches ----

static Result launch(struct Function *of, const unsigned *grid, const unsigned *block, unsigned shared, void *stream,
                     void **parameters) {
    const unsigned threads = block[0] * block[1] * block[2];
    if (!stream || !parameters) return refused("a launch without a stream or parameters", of->name, 0);
    if (!grid[0] || !grid[1] || !grid[2] || !threads || threads > of->threads)
        return refused("a launch of so many threads a block", of->name, threads);
    if (shared > of->shared_bytes) return refused("more shared memory than a launch may have", of->name, shared);
    const char *launched = getenv("LOOPLANE_DRIVER_LAUNCHED");
    if (launched && !of->launched++) {
        FILE *file = fopen(launched, "a");
        if (file) fprintf(file, "%s\n", of->name), fclose(file);
    }
    answer();
    return OK;
}
Result cuLaunchKernelEx(const unsigned *config, void *function, void **parameters, void **extra) {
    void *stream;
    memcpy(&stream, config + 8, sizeof stream);  // behind the grid, the block, shared bytes and padding
    return launch(function, config, config + 3, config[6], stream, parameters);
}
Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **parameters, void **extra) {
    const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    return launch(function, grid, block, shared, stream, parameters);
}
Result cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                 unsigned bz, unsigned shared, void *stream, void **parameters) {
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, NULL);
}

static Result make(void **handle) {
    *handle = malloc(1);
    return *handle ? OK : NO_MEMORY;
}
static Result unmake(void *handle) {
    free(handle);
    return OK;
}
static Result wait_for_all(void) {
    answer();
    return OK;
}
Result cuStreamCreate(void **stream, unsigned flags) { return make(stream); }
Result cuStreamDestroy_v2(void *stream) { return unmake(stream); }
Result cuStreamSynchronize(void *stream) { return wait_for_all(); }
Result cuStreamQuery(void *stream) { return wait_for_all(); }
Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return OK; }
Result cuStreamBeginCapture_v2(void *stream, int mode) { return OK; }
Result cuStreamEndCapture(void *stream, void **graph) { return make(graph); }
Result cuStreamBatchMemOp_v2(void *stream, unsigned count, const void *operations, unsigned flags) { return OK; }
Result cuGraphInstantiateWithFlags(void **executable, void *graph, uint64_t flags) { return make(executable); }
Result cuGraphLaunch(void *executable, void *stream) { return wait_for_all(); }
Result cuGraphDestroy(void *graph) { return unmake(graph); }
Result cuGraphExecDestroy(void *executable) { return unmake(executable); }
Result cuEventCreate(void **event, unsigned flags) { return make(event); }
Result cuEventDestroy_v2(void *event) { return unmake(event); }
Result cuEventRecord(void *event, void *stream) { return OK; }
Result cuEventElapsedTime_v2(float *ms, void *first, void *second) {
    *ms = 1;
    return OK;
}
