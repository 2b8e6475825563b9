// A CUDA driver library that runs nothing and writes down what Triton's launcher asks of it, one
// line each, to the file in RECORDED_LAUNCHES: `load`, or `launch kernel grid stream`.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void note(const char* what, const char* name, unsigned grid, void* stream) {
  const char* path = getenv("RECORDED_LAUNCHES");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s %s %u %llu\n", what, name, grid, (unsigned long long)stream);
  fclose(file);
}

static _Thread_local CUcontext current;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** text) {
  return *text = "recording driver", CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int index) { return *device = index, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return *context = (CUcontext)(size_t)(device + 1), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32
      : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 108
      : attribute == CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK ? 65536
                                                                 : 166912;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  note("load", "-", 0, NULL);
  return *module = (CUmodule)1, CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return *function = (CUfunction)strdup(name), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction function, const CUlaunchConfig* config) {
  return *count = 1, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr*)data = pointer;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(
    const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
  note("launch", (const char*)function, config->gridDimX, config->hStream);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(
    CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
    unsigned shared, CUstream stream, void** arguments, void** extra) {
  note("launch", (const char*)function, x, stream);
  return CUDA_SUCCESS;
}
