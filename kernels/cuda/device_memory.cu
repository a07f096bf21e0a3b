// Device memory that other processes can map: plain allocations, their IPC handles, and mappings of other processes' handles.
// Every function returns a CUDA error code; `describe_error` names one.
#include <cuda_runtime.h>
#include <string.h>

extern "C" int device_memory_allocate(int device, unsigned long long bytes, void** address) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaMalloc(address, bytes);
  if (error == cudaSuccess) error = cudaMemset(*address, 0, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  cudaGetLastError();
  return static_cast<int>(error);
}

extern "C" int device_memory_free(int device, void* address) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaFree(address);
  return static_cast<int>(error);
}

extern "C" int device_memory_export(int device, void* address, void* handle) {
  cudaError_t error = cudaSetDevice(device);
  cudaIpcMemHandle_t own;
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&own, address);
  if (error == cudaSuccess) memcpy(handle, &own, sizeof(own));
  cudaGetLastError();
  return static_cast<int>(error);
}

extern "C" int device_memory_open(int device, const void* handle, void** address) {
  cudaError_t error = cudaSetDevice(device);
  cudaIpcMemHandle_t other;
  memcpy(&other, handle, sizeof(other));
  if (error == cudaSuccess) error = cudaIpcOpenMemHandle(address, other, cudaIpcMemLazyEnablePeerAccess);
  cudaGetLastError();
  return static_cast<int>(error);
}

extern "C" int device_memory_close(int device, void* address) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaIpcCloseMemHandle(address);
  cudaGetLastError();
  return static_cast<int>(error);
}

// A plain copy by the copy engines, enqueued on a stream.
extern "C" int device_memory_copy(void* target, const void* source, unsigned long long bytes, void* stream) {
  return static_cast<int>(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}

extern "C" const char* device_memory_describe_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
