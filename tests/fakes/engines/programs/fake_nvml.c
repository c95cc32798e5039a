/* A driver library with two GPUs, for tests of telemetry on machines that have none.
 *
 * Built with some of WITH_V3, WITH_V2 and WITH_V1, which are the versions of the process lists it has, and with
 * BARE, which makes it refuse everything that a driver may refuse. FAKE_NVML_PROCESSES is "GPU:KIND:PID:MIB,..." where KIND
 * is c (compute) or g (graphics) and a negative MIB is "not available". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GPUS 2
#define MIB (1024ULL * 1024ULL)
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7

typedef int Status;
typedef void *Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long used; } OldProcess;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

static long number_of(Device device) { return (long)device - 1; }

static Status put(char *buffer, unsigned length, const char *text) {
    snprintf(buffer, length, "%s", text);
    return 0;
}

Status nvmlInitWithFlags(unsigned flags) { (void)flags; return getenv("FAKE_NVML_BROKEN") ? 9 : 0; }
Status nvmlShutdown(void) { return 0; }
Status nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return 0; }
Status nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if (index >= GPUS) return NOT_FOUND;
    *device = (Device)(long)(index + 1);
    return 0;
}
Status nvmlDeviceGetUUID(Device device, char *buffer, unsigned length) {
    return put(buffer, length, number_of(device) == 0 ? "GPU-aaaa1111-0000" : "GPU-bbbb2222-0000");
}
const char *nvmlErrorString(Status status) { (void)status; return "refused by the fake driver"; }

#ifndef BARE
Status nvmlDeviceGetName(Device device, char *buffer, unsigned length) { (void)device; return put(buffer, length, "Fake GPU 24GB"); }
Status nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    memory->total = 24576 * MIB;
    memory->used = (number_of(device) + 1) * 4096 * MIB;
    memory->free = memory->total - memory->used;
    return 0;
}
Status nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) {
    rates->gpu = 10 * (number_of(device) + 1);
    rates->memory = 5;
    return 0;
}
Status nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius) { (void)device; (void)sensor; *celsius = 55; return 0; }
Status nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) { (void)device; *milliwatts = 120500; return 0; }
#else
Status nvmlDeviceGetMemoryInfo(Device device, Memory *memory) { (void)device; (void)memory; return NOT_SUPPORTED; }
Status nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) { (void)device; (void)milliwatts; return NOT_SUPPORTED; }
#endif

/* Fills pids and amounts with what runs on a GPU; returns how many. */
__attribute__((unused)) static unsigned list(Device device, char kind, unsigned *pids, unsigned long long *used, unsigned room) {
    const char *text = getenv("FAKE_NVML_PROCESSES");
    unsigned count = 0;
    while (text && *text) {
        long gpu, pid, mib;
        char its_kind;
        if (sscanf(text, "%ld:%c:%ld:%ld", &gpu, &its_kind, &pid, &mib) != 4) break;
        if (gpu == number_of(device) && its_kind == kind && count < room) {
            pids[count] = (unsigned)pid;
            used[count++] = mib < 0 ? ~0ULL : (unsigned long long)mib * MIB;
        }
        text = strchr(text, ',');
        if (text) text++;
    }
    return count;
}

#define PROCESS_LIST(NAME, KIND, TYPE)                                              \
    Status NAME(Device device, unsigned *count, TYPE *entries) {                    \
        unsigned pids[16], room = *count;                                            \
        unsigned long long used[16];                                                \
        unsigned found = list(device, KIND, pids, used, 16);                        \
        *count = found;                                                             \
        if (found == 0) return 0;                                                   \
        if (entries == NULL || room < found) return INSUFFICIENT_SIZE;              \
        for (unsigned i = 0; i < found; i++) {                                      \
            memset(&entries[i], 0, sizeof entries[i]);                              \
            entries[i].pid = pids[i];                                               \
            entries[i].used = used[i];                                              \
        }                                                                           \
        return 0;                                                                   \
    }

#ifdef WITH_V3
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, 'c', Process)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, 'g', Process)
#endif
#ifdef WITH_V2
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, 'c', Process)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, 'g', Process)
#endif
#ifdef WITH_V1
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, 'c', OldProcess)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, 'g', OldProcess)
#endif
