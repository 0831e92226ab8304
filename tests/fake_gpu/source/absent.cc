// Calls of CUDA and NCCL that torch or Horovod could make, and the stand-in has not: they say so and fail. Without
// these the real libraries would answer, which know nothing of the stand-in's streams.
#include "settings.h"

#include <cstdio>

static int absent(const char *call, int error) {
    fprintf(stderr, "fake_gpu: there is no %s in the stand-in\n", call);
    return error;
}

// The headers are not included: these are only names. 801 is cudaErrorNotSupported, 5 is ncclInvalidUsage.
#define NO_CUDA(call)                                                                                                  \
    API int call() { return absent(#call, 801); }
#define NO_NCCL(call)                                                                                                  \
    API int call() { return absent(#call, 5); }

NO_CUDA(cudaDeviceEnablePeerAccess)
NO_CUDA(cudaDeviceGetDefaultMemPool)
NO_CUDA(cudaDeviceGetGraphMemAttribute)
NO_CUDA(cudaDeviceSetGraphMemAttribute)
NO_CUDA(cudaFreeAsync)
NO_CUDA(cudaFuncGetAttributes)
NO_CUDA(cudaFuncSetAttribute)
NO_CUDA(cudaGetSymbolAddress)
NO_CUDA(cudaGraphAddNode)
NO_CUDA(cudaGraphConditionalHandleCreate)
NO_CUDA(cudaGraphDestroy)
NO_CUDA(cudaGraphExecDestroy)
NO_CUDA(cudaGraphGetNodes)
NO_CUDA(cudaGraphInstantiate)
NO_CUDA(cudaGraphInstantiateWithFlags)
NO_CUDA(cudaGraphLaunch)
NO_CUDA(cudaGraphNodeGetDependencies)
NO_CUDA(cudaGraphRetainUserObject)
NO_CUDA(cudaIpcCloseMemHandle)
NO_CUDA(cudaIpcGetEventHandle)
NO_CUDA(cudaIpcGetMemHandle)
NO_CUDA(cudaIpcOpenEventHandle)
NO_CUDA(cudaIpcOpenMemHandle)
NO_CUDA(cudaKernelSetAttributeForDevice)
NO_CUDA(cudaLibraryGetGlobal)
NO_CUDA(cudaLibraryGetKernel)
NO_CUDA(cudaLibraryGetKernelCount)
NO_CUDA(cudaLibraryGetManaged)
NO_CUDA(cudaLibraryGetUnifiedFunction)
NO_CUDA(cudaLibraryLoadData)
NO_CUDA(cudaLibraryLoadFromFile)
NO_CUDA(cudaLibraryUnload)
NO_CUDA(cudaMallocAsync)
NO_CUDA(cudaMallocManaged)
NO_CUDA(cudaMemPoolGetAttribute)
NO_CUDA(cudaMemPoolSetAccess)
NO_CUDA(cudaMemPoolSetAttribute)
NO_CUDA(cudaMemPoolTrimTo)
NO_CUDA(cudaMemcpy2DAsync)
NO_CUDA(cudaMemcpyToSymbol)
NO_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
NO_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
NO_CUDA(cudaProfilerStart)
NO_CUDA(cudaProfilerStop)
NO_CUDA(cudaStreamBeginCapture)
NO_CUDA(cudaStreamBeginCaptureToGraph)
NO_CUDA(cudaStreamEndCapture)
NO_CUDA(cudaStreamUpdateCaptureDependencies)
NO_CUDA(cudaUserObjectCreate)
NO_CUDA(cudaUserObjectRelease)
NO_NCCL(ncclAlltoAll)
NO_NCCL(ncclCommDeregister)
NO_NCCL(ncclCommInitAll)
NO_NCCL(ncclCommInitRankScalable)
NO_NCCL(ncclCommRegister)
NO_NCCL(ncclCommSplit)
NO_NCCL(ncclGather)
NO_NCCL(ncclRecv)
NO_NCCL(ncclScatter)
NO_NCCL(ncclSend)

// 15 is CUPTI_ERROR_NOT_INITIALIZED.
#define NO_CUPTI(call)                                                                                                 \
    API int call() { return 15; }

NO_CUPTI(cuptiActivityDisable)
NO_CUPTI(cuptiActivityEnable)
NO_CUPTI(cuptiActivityEnableCudaEventDeviceTimestamps)
NO_CUPTI(cuptiActivityEnableDriverApi)
NO_CUPTI(cuptiActivityEnableRuntimeApi)
NO_CUPTI(cuptiActivityFlushAll)
NO_CUPTI(cuptiActivityGetNextRecord)
NO_CUPTI(cuptiActivityGetNumDroppedRecords)
NO_CUPTI(cuptiActivityPopExternalCorrelationId)
NO_CUPTI(cuptiActivityPushExternalCorrelationId)
NO_CUPTI(cuptiActivityRegisterCallbacks)
NO_CUPTI(cuptiActivityRegisterTimestampCallback)
NO_CUPTI(cuptiActivitySetAttribute)
NO_CUPTI(cuptiEnableCallback)
NO_CUPTI(cuptiEnableDomain)
NO_CUPTI(cuptiFinalize)
NO_CUPTI(cuptiGetCallbackName)
NO_CUPTI(cuptiGetVersion)
NO_CUPTI(cuptiSubscribe)
NO_CUPTI(cuptiUnsubscribe)

API int cuptiGetResultString(int, const char **text) {
    *text = "there is no profiler in the stand-in";
    return 0;
}
