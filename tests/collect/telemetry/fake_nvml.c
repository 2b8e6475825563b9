/* A small stand-in for libnvidia-ml.so.1, so that the real pynvml can be run without a GPU.
 *
 * What it answers stands in a text file beside it, "<library>.conf", read again at every call:
 *
 *   driver 560.35.03
 *   init 9                              nvmlInit fails with this code
 *   gpu uuid=GPU-.. bus=.. power=250000 a GPU and its values; one that is missing: not supported
 *   mig uuid=MIG-.. of=GPU-.. used=..   a slice, in the order of its GPU's places
 *   fail nvmlDeviceGetPowerUsage 4      a call fails with this code,
 *   fail nvmlDeviceGetPowerUsage 4 GPU- only on devices whose UUID begins so
 *   lost GPU-.. 30                      the GPU is lost from its 31st call on
 *   hang nvmlDeviceGetPowerUsage        a call hangs as long as this line stands there
 *
 * Built with -DOLD_DRIVER it lacks the functions that came with newer drivers.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7,
       LOST = 15 };
enum { MOST = 16, LONGEST = 1024 };

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { char kind[8], uuid[96], of[96], line[LONGEST]; u32 calls; } Device;

static Device devices[MOST]; /* handles point into it; lines keep their order, so they stay valid */
static int count, started;
static char text[65536];

static void value_text(const char *line, const char *key, char *out, size_t size)
{
    char pattern[64];
    snprintf(pattern, sizeof pattern, " %s=", key);
    const char *at = strstr(line, pattern);
    if (at) at += strlen(pattern);
    size_t length = at ? strcspn(at, " \n") : 0;
    if (length >= size) length = size - 1;
    if (length) memcpy(out, at, length);
    out[length] = 0;
}

static void reload(void)
{
    Dl_info self;
    char path[LONGEST + 8];
    dladdr((void *)reload, &self);
    snprintf(path, sizeof path, "%s.conf", self.dli_fname);
    FILE *file = fopen(path, "r");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = 0;
    if (file) fclose(file);
    count = 0;
    for (char *line = text; *line && count < MOST; line += strcspn(line, "\n"), line += *line == '\n') {
        if (strncmp(line, "gpu ", 4) && strncmp(line, "mig ", 4)) continue;
        Device *device = &devices[count++];
        snprintf(device->line, LONGEST, "%.*s", (int)strcspn(line, "\n"), line);
        snprintf(device->kind, sizeof device->kind, "%.3s", line);
        value_text(device->line, "uuid", device->uuid, sizeof device->uuid);
        value_text(device->line, "of", device->of, sizeof device->of);
    }
}

/* The rest of the first line that begins with `head`, NULL without one. */
static const char *line_after(const char *from, const char *head)
{
    for (const char *line = from; *line; line += strcspn(line, "\n"), line += *line == '\n')
        if (!strncmp(line, head, strlen(head))) return line + strlen(head);
    return NULL;
}

static int trouble(const char *function, Device *device)
{
    char head[128], prefix[96];
    reload();
    snprintf(head, sizeof head, "hang %s\n", function);
    while (line_after(text, head)) { usleep(2000); reload(); }
    if (!started) return UNINITIALIZED;
    if (device) {
        const char *after;
        device->calls++;
        snprintf(head, sizeof head, "lost %s ", device->uuid);
        if ((after = line_after(text, head)) && device->calls > (u32)atoi(after)) return LOST;
    }
    snprintf(head, sizeof head, "fail %s ", function);
    for (const char *at = text; (at = line_after(at, head)); ) {
        int code = 0;
        prefix[0] = 0;
        sscanf(at, "%d%*[ ]%90[^ \n]", &code, prefix);
        if (!prefix[0] || (device && !strncmp(device->uuid, prefix, strlen(prefix)))) return code;
    }
    return SUCCESS;
}

static int number(const char *function, Device *device, const char *key, u64 *out)
{
    char found[64];
    int code = trouble(function, device);
    if (code) return code;
    value_text(device->line, key, found, sizeof found);
    if (!found[0]) return NOT_SUPPORTED;
    *out = strtoull(found, NULL, 0);
    return SUCCESS;
}

static int small(const char *function, Device *device, const char *key, u32 *out)
{
    u64 wide = 0;
    int code = number(function, device, key, &wide);
    *out = (u32)wide;
    return code;
}

static int words(const char *function, Device *device, const char *key, char *out, u32 size)
{
    int code = trouble(function, device);
    if (!code) value_text(device->line, key, out, size);
    return code;
}

int nvmlInitWithFlags(u32 flags)
{
    (void)flags;
    started++;
    int code = trouble(__func__, NULL);
    const char *init = line_after(text, "init ");
    if (!code && init) code = atoi(init);
    if (code) started--;
    return code;
}
int nvmlShutdown(void) { if (started) started--; return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "An error without a name"; }

int nvmlSystemGetDriverVersion(char *out, u32 size)
{
    int code = trouble(__func__, NULL);
    const char *version = line_after(text, "driver ");
    if (!code) snprintf(out, size, "%.*s", (int)strcspn(version ? version : "", "\n"), version ? version : "");
    return code;
}
int nvmlDeviceGetCount_v2(u32 *out)
{
    int code = trouble(__func__, NULL);
    *out = 0;
    for (int i = 0; i < count; i++) *out += devices[i].kind[0] == 'g';
    return code;
}
int nvmlDeviceGetHandleByIndex_v2(u32 index, Device **out)
{
    int code = trouble(__func__, NULL);
    for (int i = 0; !code && i < count; i++)
        if (devices[i].kind[0] == 'g' && index-- == 0) { *out = &devices[i]; return trouble(__func__, *out); }
    return code ? code : INVALID;
}
int nvmlDeviceGetUUID(Device *d, char *out, u32 size) { return words(__func__, d, "uuid", out, size); }
int nvmlDeviceGetName(Device *d, char *out, u32 size) { return words(__func__, d, "name", out, size); }

typedef struct { char old_bus[16]; u32 domain, bus, device, ids, subsystem; char bus_id[32]; } PciInfo;
int nvmlDeviceGetPciInfo_v3(Device *d, PciInfo *out)
{
    return words(__func__, d, "bus", out->bus_id, sizeof out->bus_id);
}

int nvmlDeviceGetMigMode(Device *d, u32 *now, u32 *later)
{
    int code = small(__func__, d, "mig", now);
    *later = *now;
    return code;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *d, u32 *out) { *out = 7; return trouble(__func__, d); }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, u32 index, Device **out)
{
    int code = trouble(__func__, d);
    for (int i = 0; !code && i < count; i++)
        if (!strcmp(devices[i].of, d->uuid) && index-- == 0) { *out = &devices[i]; return SUCCESS; }
    return code ? code : NOT_FOUND;
}

typedef struct { u64 total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device *d, Memory *out)
{
    int code = number(__func__, d, "used", &out->used);
    if (!code) code = number(__func__, d, "total", &out->total);
    out->free = out->total - out->used;
    return code;
}
typedef struct { u32 gpu, memory; } Rates;
int nvmlDeviceGetUtilizationRates(Device *d, Rates *out)
{
    int code = small(__func__, d, "busy", &out->gpu);
    return code ? code : small(__func__, d, "traffic", &out->memory);
}
int nvmlDeviceGetPowerUsage(Device *d, u32 *out) { return small(__func__, d, "power", out); }
int nvmlDeviceGetEnforcedPowerLimit(Device *d, u32 *out) { return small(__func__, d, "limit", out); }
int nvmlDeviceGetTemperature(Device *d, int sensor, u32 *out)
{
    return sensor ? INVALID : small(__func__, d, "heat", out);
}
int nvmlDeviceGetClockInfo(Device *d, int kind, u32 *out)
{
    const char *keys[] = {"graphics", "sm", "mem"};
    return small(__func__, d, keys[kind], out);
}
int nvmlDeviceGetTotalEccErrors(Device *d, int kind, int aggregate, u64 *out)
{
    return number(__func__, d, aggregate ? "lifetime" : kind ? "lost_bits" : "corrected", out);
}
int nvmlDeviceGetPcieReplayCounter(Device *d, u32 *out) { return small(__func__, d, "replay", out); }
int nvmlDeviceGetPcieThroughput(Device *d, int receiving, u32 *out)
{
    return small(__func__, d, receiving ? "rx" : "tx", out);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, u64 *out)
{
    return number(__func__, d, "throttle", out);
}

typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } Process;
int nvmlDeviceGetComputeRunningProcesses_v2(Device *d, u32 *size, Process *out)
{
    u32 there = 0, room = *size;
    int code = small(__func__, d, "procs", &there);
    *size = there;
    if (code || there <= room) for (u32 i = 0; !code && i < there; i++) out[i].pid = 100 + i;
    else code = SMALL;
    return code;
}
int nvmlDeviceGetNvLinkState(Device *d, u32 link, u32 *up)
{
    u32 links = 0;
    int code = small(__func__, d, "links", &links);
    *up = link < links;
    return code ? code : link < links ? SUCCESS : INVALID;
}

typedef struct { u32 field, scope; long long time, latency; int kind, code; u64 value; } FieldValue;
/* Field n is the value "f<n>"; with links it is that of one link, times the link's number + 1. */
int nvmlDeviceGetFieldValues(Device *d, int size, FieldValue *values)
{
    int code = trouble(__func__, d);
    for (int i = 0; !code && i < size; i++) {
        char key[16], found[64];
        snprintf(key, sizeof key, "f%u", values[i].field);
        value_text(d->line, key, found, sizeof found);
        values[i].code = found[0] ? SUCCESS : NOT_SUPPORTED;
        values[i].kind = 3;
        values[i].value = strtoull(found, NULL, 0) * (values[i].scope + 1);
    }
    return code;
}

#ifndef OLD_DRIVER
typedef struct { u32 version; int sensor, celsius; } Temperature;
int nvmlDeviceGetTemperatureV(Device *d, Temperature *out)
{
    return out->sensor ? INVALID : small(__func__, d, "heat", (u32 *)&out->celsius);
}
int nvmlDeviceGetCurrentClocksEventReasons(Device *d, u64 *out)
{
    return number(__func__, d, "throttle", out);
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, u32 *size, Process *out)
{
    return nvmlDeviceGetComputeRunningProcesses_v2(d, size, out);
}
#endif
