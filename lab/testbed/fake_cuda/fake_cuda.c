/* A CUDA driver without a GPU, for tests: device memory is an anonymous file, and misuse is an error or a crash.

   A device address points to memory that nobody may touch, so that a host that follows it dies, as with a real one; the
   bytes are mapped elsewhere. Copies run when their stream is synchronized and not before, so that whoever does not
   wait sees old bytes. Prototypes and numbers are those of the cuda.h that it is compiled with.

   FAKE_CUDA_TOUCHABLE=1 maps memory at its device address, too, once access is set: for kernels that are interpreted by
   this host, which stands for the device then. FAKE_CUDA_DEVICES, FAKE_CUDA_TOTAL_BYTES and FAKE_CUDA_USED_BYTES (what
   "others" use) say what there is; CUDA_VISIBLE_DEVICES chooses and orders devices by their numbers. With
   FAKE_CUDA_NO_PEERS no device reaches another one's memory. With FAKE_CUDA_FABRIC devices have fabric handles, which
   the system permits where it is 1. */
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The driver exports the second one; headers before CUDA 13 give it no other name. */
#ifndef cuDeviceGetUuid
#define cuDeviceGetUuid cuDeviceGetUuid_v2
#endif

#define GRANULARITY (2UL << 20)
#define FABRIC CU_MEM_HANDLE_TYPE_FABRIC
#define MANY 512
#define DEVICES 4
#define NAME "fake-cuda-memory"

struct allocation { int used, fd, device, handles, maps; ino_t file; size_t size; };
/* `access` is the device that may use it, counted from 1. */
struct mapping { int used, allocation, access, reservation; CUdeviceptr at; size_t size; char *bytes; };
struct reservation { int used; CUdeviceptr at; size_t size; };
struct pinned { int used; char *at; size_t size; };
/* `rows` of `size` bytes; a plain copy has one. */
struct copy { int to_device, from_device; unsigned long long target, source; size_t size, rows, target_pitch, source_pitch; };
struct CUstream_st { int used, device; int count; struct copy copies[MANY]; };
struct CUctx_st { int device, retained; };

static struct allocation allocations[MANY];
static struct mapping mappings[MANY];
static struct reservation reservations[MANY];
static struct pinned pins[MANY];
static struct CUstream_st streams[MANY];
static struct CUctx_st contexts[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread CUcontext stack[16];
static __thread int depth;
static int initialized, fail_next, last_handle_types;
static unsigned long long copied;

static size_t number(const char *name, size_t otherwise) {
    const char *said = getenv(name);
    return said ? strtoull(said, NULL, 10) : otherwise;
}
/* The device that this process calls `index`, by its number among all, or -1. */
static int physical(int index) {
    const char *said = getenv("CUDA_VISIBLE_DEVICES");
    long all = (long)number("FAKE_CUDA_DEVICES", 1);
    if (!said) return index < all ? index : -1;
    for (int at = 0;; at++) {
        char *end;
        long named = strtol(said, &end, 10);
        if (end == said || named < 0 || named >= all) return -1;
        if (at == index) return (int)named;
        if (*end != ',') return -1;
        said = end + 1;
    }
}
static int devices(void) {
    int count = 0;
    while (count < DEVICES && physical(count) >= 0) count++;
    return count;
}
static int reaches(int device, int other) { return device == other || !getenv("FAKE_CUDA_NO_PEERS"); }
static size_t total(void) { return number("FAKE_CUDA_TOTAL_BYTES", 256UL << 20); }
static size_t in_use(int device) {
    size_t sum = number("FAKE_CUDA_USED_BYTES", 0);
    for (int i = 0; i < MANY; i++) {
        int again = !allocations[i].used || allocations[i].device != device;
        /* The same memory may have been imported as well. */
        for (int j = 0; j < i; j++) again |= allocations[j].used && allocations[j].file == allocations[i].file;
        if (!again) sum += allocations[i].size;
    }
    return sum;
}

/* For tests: bytes that this process copied, the next synchronize fails with that result, and the kinds of handles
   that the last memory was made with. */
unsigned long long fake_cuda_copied_bytes(void) { return copied; }
void fake_cuda_fail_next(int result) { fail_next = result; }
int fake_cuda_handle_types(void) { return last_handle_types; }

#define LOCKED(...) do { \
    pthread_mutex_lock(&lock); \
    CUresult done = CUDA_SUCCESS; \
    __VA_ARGS__ \
    pthread_mutex_unlock(&lock); \
    return done; \
} while (0)
#define NEED(condition, result) if (!(condition)) { done = (result); goto out; }
#define CONTEXT NEED(depth > 0, CUDA_ERROR_INVALID_CONTEXT)

CUresult CUDAAPI cuInit(unsigned int flags) {
    initialized = flags == 0;
    return initialized ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuDriverGetVersion(int *version) { *version = 12080; return CUDA_SUCCESS; }
CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
          : error == CUDA_ERROR_INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == CUDA_ERROR_INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE"
          : error == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuDeviceGetCount(int *count) {
    if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
    *count = devices();
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int index) {
    if (index < 0 || index >= devices()) return CUDA_ERROR_INVALID_DEVICE;
    *device = index;
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0xa0 + physical(device), sizeof *uuid);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
          || attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
          || attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
          || (attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED && getenv("FAKE_CUDA_FABRIC"));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice other) {
    if (device < 0 || other < 0 || device >= devices() || other >= devices()) return CUDA_ERROR_INVALID_DEVICE;
    *can = device != other && reaches(device, other);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    LOCKED({ contexts[device].device = device; contexts[device].retained++; *context = &contexts[device]; });
}
CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    LOCKED({ NEED(contexts[device].retained > 0, CUDA_ERROR_INVALID_CONTEXT) contexts[device].retained--; out:; });
}
CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
    if (!context || context->retained <= 0 || depth >= 16) return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxPopCurrent(CUcontext *context) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[--depth];
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    LOCKED({
        CONTEXT
        *total_bytes = total();
        size_t gone = in_use(stack[depth - 1]->device);
        *free_bytes = gone < total() ? total() - gone : 0;
        out:;
    });
}

static int sound(const CUmemAllocationProp *prop) {
    return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE
        && prop->location.id >= 0 && prop->location.id < devices() && !prop->win32HandleMetaData
        && (prop->requestedHandleTypes & ~FABRIC) == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        && prop->allocFlags.compressionType == 0 && prop->allocFlags.gpuDirectRDMACapable <= 1;
}
CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *prop,
                                               CUmemAllocationGranularity_flags option) {
    (void)option;
    *size = GRANULARITY;
    return sound(prop) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int new_allocation(int fd, size_t size, int device) {
    struct stat status;
    fstat(fd, &status);
    for (int i = 0; i < MANY; i++)
        if (!allocations[i].used) {
            allocations[i] = (struct allocation){1, fd, device, 1, 0, status.st_ino, size};
            return i;
        }
    return -1;
}
static void drop_if_unused(struct allocation *it) {
    if (it->handles || it->maps) return;
    close(it->fd);
    it->used = 0;
}
static struct allocation *by_handle(CUmemGenericAllocationHandle handle) {
    return handle > 0 && handle <= MANY && allocations[handle - 1].used && allocations[handle - 1].handles > 0
         ? &allocations[handle - 1] : NULL;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                             unsigned long long flags) {
    LOCKED({
        CONTEXT
        NEED(sound(prop) && !flags && size && size % GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE)
        int fabric = (prop->requestedHandleTypes & FABRIC) != 0;
        NEED(!fabric || number("FAKE_CUDA_FABRIC", 0) == 1, CUDA_ERROR_NOT_PERMITTED)
        NEED(in_use(prop->location.id) + size <= total(), CUDA_ERROR_OUT_OF_MEMORY)
        last_handle_types = prop->requestedHandleTypes;
        char name[64];
        snprintf(name, sizeof name, "%s-%d", NAME, physical(prop->location.id));
        int fd = memfd_create(name, MFD_CLOEXEC);
        NEED(fd >= 0 && ftruncate(fd, (off_t)size) == 0, CUDA_ERROR_OUT_OF_MEMORY)
        *handle = (CUmemGenericAllocationHandle)(new_allocation(fd, size, prop->location.id) + 1);
        out:;
    });
}
CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    LOCKED({
        struct allocation *it = by_handle(handle);
        NEED(it, CUDA_ERROR_INVALID_VALUE)
        it->handles--;
        drop_if_unused(it);
        out:;
    });
}
CUresult CUDAAPI cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long flags) {
    LOCKED({
        struct allocation *it = by_handle(handle);
        NEED(it && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !flags, CUDA_ERROR_INVALID_VALUE)
        *(int *)shareable = dup(it->fd);
        out:;
    });
}
CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                                CUmemAllocationHandleType type) {
    LOCKED({
        CONTEXT
        int fd = (int)(long)shareable;
        char path[64];
        char name[128] = {0};
        struct stat status;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        NEED(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE)
        NEED(readlink(path, name, sizeof name - 1) > 0 && strstr(name, NAME), CUDA_ERROR_INVALID_HANDLE)
        NEED(fstat(fd, &status) == 0, CUDA_ERROR_INVALID_HANDLE)
        int home = atoi(strstr(name, NAME) + strlen(NAME "-"));
        int device = 0;
        while (device < devices() && physical(device) != home) device++;
        NEED(device < devices(), CUDA_ERROR_INVALID_DEVICE)
        *handle = (CUmemGenericAllocationHandle)(new_allocation(dup(fd), (size_t)status.st_size, device) + 1);
        out:;
    });
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr hint,
                                     unsigned long long flags) {
    LOCKED({
        NEED(size && size % GRANULARITY == 0 && !alignment && !hint && !flags, CUDA_ERROR_INVALID_VALUE)
        for (int i = 0; i < MANY; i++)
            if (!reservations[i].used) {
                void *nowhere = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                NEED(nowhere != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY)
                reservations[i] = (struct reservation){1, (CUdeviceptr)nowhere, size};
                *at = reservations[i].at;
                goto out;
            }
        done = CUDA_ERROR_OUT_OF_MEMORY;
        out:;
    });
}
static int reservation_at(CUdeviceptr at, size_t size) {
    for (int i = 0; i < MANY; i++)
        if (reservations[i].used && reservations[i].at == at && reservations[i].size == size) return i;
    return -1;
}
CUresult CUDAAPI cuMemAddressFree(CUdeviceptr at, size_t size) {
    LOCKED({
        int found = reservation_at(at, size);
        NEED(found >= 0, CUDA_ERROR_INVALID_VALUE)
        for (int i = 0; i < MANY; i++) NEED(!mappings[i].used || mappings[i].reservation != found, CUDA_ERROR_INVALID_VALUE)
        munmap((void *)at, size);
        reservations[found].used = 0;
        out:;
    });
}
CUresult CUDAAPI cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
    LOCKED({
        CONTEXT
        struct allocation *it = by_handle(handle);
        int found = reservation_at(at, size);
        NEED(it && found >= 0 && !offset && !flags && it->size == size, CUDA_ERROR_INVALID_VALUE)
        for (int i = 0; i < MANY; i++) NEED(!mappings[i].used || mappings[i].at != at, CUDA_ERROR_ALREADY_MAPPED)
        for (int i = 0; i < MANY; i++)
            if (!mappings[i].used) {
                void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, it->fd, 0);
                NEED(bytes != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY)
                mappings[i] = (struct mapping){1, (int)handle - 1, 0, found, at, size, bytes};
                it->maps++;
                goto out;
            }
        done = CUDA_ERROR_OUT_OF_MEMORY;
        out:;
    });
}
CUresult CUDAAPI cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *said, size_t count) {
    LOCKED({
        CONTEXT
        NEED(count == 1 && said->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE)
        NEED(said->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CUDA_ERROR_INVALID_VALUE)
        for (int i = 0; i < MANY; i++)
            if (mappings[i].used && mappings[i].at == at && mappings[i].size == size) {
                int device = said->location.id;
                NEED(device >= 0 && device < devices(), CUDA_ERROR_INVALID_DEVICE)
                NEED(reaches(device, allocations[mappings[i].allocation].device), CUDA_ERROR_INVALID_DEVICE)
                mappings[i].access = device + 1;
                if (getenv("FAKE_CUDA_TOUCHABLE"))
                    mmap((void *)at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                         allocations[mappings[i].allocation].fd, 0);
                goto out;
            }
        done = CUDA_ERROR_INVALID_VALUE;
        out:;
    });
}
static size_t extent(const struct copy *one, size_t pitch) { return (one->rows - 1) * pitch + one->size; }
static int inside(unsigned long long at, size_t size, CUdeviceptr from, size_t length) {
    return at >= from && at + size <= from + length;
}
CUresult CUDAAPI cuMemUnmap(CUdeviceptr at, size_t size) {
    LOCKED({
        int found = -1;
        for (int i = 0; i < MANY; i++) if (mappings[i].used && mappings[i].at == at && mappings[i].size == size) found = i;
        NEED(found >= 0, CUDA_ERROR_INVALID_VALUE)
        for (int s = 0; s < MANY; s++)
            for (int c = 0; streams[s].used && c < streams[s].count; c++) {
                struct copy *one = &streams[s].copies[c];
                int busy = (one->to_device && inside(one->target, extent(one, one->target_pitch), at, size))
                        || (one->from_device && inside(one->source, extent(one, one->source_pitch), at, size));
                NEED(!busy, CUDA_ERROR_ILLEGAL_ADDRESS)
            }
        struct allocation *it = &allocations[mappings[found].allocation];
        munmap(mappings[found].bytes, size);
        mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        mappings[found].used = 0;
        it->maps--;
        drop_if_unused(it);
        out:;
    });
}

CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags) {
    LOCKED({
        CONTEXT
        NEED(flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE)
        for (int i = 0; i < MANY; i++)
            if (!streams[i].used) {
                streams[i].used = 1;
                streams[i].count = 0;
                streams[i].device = stack[depth - 1]->device;
                *stream = &streams[i];
                goto out;
            }
        done = CUDA_ERROR_OUT_OF_MEMORY;
        out:;
    });
}
CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
    LOCKED({ NEED(stream && stream->used && !stream->count, CUDA_ERROR_INVALID_HANDLE) stream->used = 0; out:; });
}
static char *bytes_at(unsigned long long at, size_t size, int device) {
    for (int i = 0; i < MANY; i++)
        if (mappings[i].used && mappings[i].access == device + 1 && inside(at, size, mappings[i].at, mappings[i].size))
            return mappings[i].bytes + (at - mappings[i].at);
    return NULL;
}
CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
    LOCKED({
        CONTEXT
        NEED(stream && stream->used, CUDA_ERROR_INVALID_HANDLE)
        for (int i = 0; i < stream->count; i++) {
            struct copy *one = &stream->copies[i];
            size_t reach = extent(one, one->target_pitch), from = extent(one, one->source_pitch);
            char *target = one->to_device ? bytes_at(one->target, reach, stream->device) : (char *)one->target;
            char *source = one->from_device ? bytes_at(one->source, from, stream->device) : (char *)one->source;
            if (!target || !source) { stream->count = 0; done = CUDA_ERROR_ILLEGAL_ADDRESS; goto out; }
            for (size_t row = 0; row < one->rows; row++)
                memcpy(target + row * one->target_pitch, source + row * one->source_pitch, one->size);
            copied += one->rows * one->size;
        }
        stream->count = 0;
        done = (CUresult)fail_next;
        fail_next = 0;
        out:;
    });
}
static CUresult ask(CUstream stream, struct copy said) {
    LOCKED({
        CONTEXT
        NEED(stream && stream->used && stream->count < MANY, CUDA_ERROR_INVALID_HANDLE)
        NEED(said.size && said.rows && said.target && said.source, CUDA_ERROR_INVALID_VALUE)
        NEED(said.rows == 1 || (said.target_pitch >= said.size && said.source_pitch >= said.size), CUDA_ERROR_INVALID_VALUE)
        NEED(!said.to_device || bytes_at(said.target, extent(&said, said.target_pitch), stream->device), CUDA_ERROR_INVALID_VALUE)
        NEED(!said.from_device || bytes_at(said.source, extent(&said, said.source_pitch), stream->device), CUDA_ERROR_INVALID_VALUE)
        stream->copies[stream->count++] = said;
        out:;
    });
}
CUresult CUDAAPI cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    return ask(stream, (struct copy){0, 1, (unsigned long long)target, source, size, 1, 0, 0});
}
CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    return ask(stream, (struct copy){1, 0, target, (unsigned long long)source, size, 1, 0, 0});
}
CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
    return ask(stream, (struct copy){1, 1, target, source, size, 1, 0, 0});
}
CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D *said, CUstream stream) {
    int to_device = said->dstMemoryType == CU_MEMORYTYPE_DEVICE, from_device = said->srcMemoryType == CU_MEMORYTYPE_DEVICE;
    if (said->srcXInBytes || said->srcY || said->dstXInBytes || said->dstY || said->srcArray || said->dstArray
        || (!to_device && said->dstMemoryType != CU_MEMORYTYPE_HOST)
        || (!from_device && said->srcMemoryType != CU_MEMORYTYPE_HOST)) return CUDA_ERROR_INVALID_VALUE;
    unsigned long long target = to_device ? said->dstDevice : (unsigned long long)said->dstHost;
    unsigned long long source = from_device ? said->srcDevice : (unsigned long long)said->srcHost;
    return ask(stream, (struct copy){to_device, from_device, target, source, said->WidthInBytes, said->Height,
                                     said->dstPitch, said->srcPitch});
}

CUresult CUDAAPI cuMemHostRegister(void *at, size_t size, unsigned int flags) {
    LOCKED({
        CONTEXT
        NEED(at && size && flags == CU_MEMHOSTREGISTER_PORTABLE, CUDA_ERROR_INVALID_VALUE)
        for (int i = 0; i < MANY; i++)
            NEED(!pins[i].used || (char *)at >= pins[i].at + pins[i].size || (char *)at + size <= pins[i].at,
                 CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        for (int i = 0; i < MANY; i++)
            if (!pins[i].used) { pins[i] = (struct pinned){1, at, size}; goto out; }
        done = CUDA_ERROR_OUT_OF_MEMORY;
        out:;
    });
}
CUresult CUDAAPI cuMemHostUnregister(void *at) {
    LOCKED({
        CONTEXT
        for (int i = 0; i < MANY; i++) if (pins[i].used && pins[i].at == at) { pins[i].used = 0; goto out; }
        done = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        out:;
    });
}
