package cuda

// entry is a function of the driver: its name with the version that fits our
// arguments, and its address, 0 if the library has none.
type entry struct {
	name string
	fn   uintptr
}

// symbols are the functions that are used.
type symbols struct {
	driverGetVersion, init                                    entry
	errorName, errorString                                    entry
	deviceCount, deviceGet, deviceName, deviceUUID, device2ID entry
	deviceAttribute, deviceMemory, devicePCI, canAccessPeer   entry
	primaryRetain, primaryRelease                             entry
	ctxSet, ctxPush, ctxPop, ctxDevice, ctxEnablePeer         entry
	exchangeCaptureMode                                       entry
	streamCreate, streamDestroy, streamSynchronize            entry
	streamWaitEvent, streamWaitValue                          entry
	eventCreate, eventDestroy, eventRecord, eventQuery        entry
	memAlloc, memFree, memInfo, memRange                      entry
	pointerAttribute, memAccess, memRetain, memRelease        entry
	memAllocFromPool, memFreeAsync                            entry
	poolCreate, poolDestroy, poolTrim, poolSet, poolGet       entry
	poolAccess                                                entry
	hostRegister, hostUnregister, hostAlloc, hostFree         entry
	hostDevicePointer                                         entry
	copyToDevice, copyToHost, copyOnDevice, copyPeer, fill    entry
	copyBatch, copyBatch2                                     entry
	moduleLoad, moduleFunction, moduleUnload, launch          entry
}

// symbol is a row of the table by which the functions are looked up.
type symbol struct {
	name     string
	required bool
	at       *entry
}

func (s *symbols) table() []symbol {
	const needed, optional = true, false
	return []symbol{
		{"cuDriverGetVersion", needed, &s.driverGetVersion},
		{"cuInit", needed, &s.init},
		{"cuGetErrorName", needed, &s.errorName},
		{"cuGetErrorString", needed, &s.errorString},
		{"cuDeviceGetCount", needed, &s.deviceCount},
		{"cuDeviceGet", needed, &s.deviceGet},
		{"cuDeviceGetName", needed, &s.deviceName},
		{"cuDeviceGetUuid", needed, &s.deviceUUID},
		{"cuDeviceGetUuid_v2", optional, &s.device2ID}, // of the instance, where a card is divided (11.4)
		{"cuDeviceGetAttribute", needed, &s.deviceAttribute},
		{"cuDeviceTotalMem_v2", needed, &s.deviceMemory},
		{"cuDeviceGetPCIBusId", needed, &s.devicePCI},
		{"cuDeviceCanAccessPeer", needed, &s.canAccessPeer},
		{"cuDevicePrimaryCtxRetain", needed, &s.primaryRetain},
		{"cuDevicePrimaryCtxRelease_v2", needed, &s.primaryRelease}, // 11.0
		{"cuCtxSetCurrent", needed, &s.ctxSet},
		{"cuCtxPushCurrent_v2", needed, &s.ctxPush},
		{"cuCtxPopCurrent_v2", needed, &s.ctxPop},
		{"cuCtxGetDevice", needed, &s.ctxDevice},
		{"cuCtxEnablePeerAccess", needed, &s.ctxEnablePeer},
		{"cuThreadExchangeStreamCaptureMode", optional, &s.exchangeCaptureMode}, // 10.1
		{"cuStreamCreate", needed, &s.streamCreate},
		{"cuStreamDestroy_v2", needed, &s.streamDestroy},
		{"cuStreamSynchronize", needed, &s.streamSynchronize},
		{"cuStreamWaitEvent", needed, &s.streamWaitEvent},
		{"cuStreamWaitValue32_v2", optional, &s.streamWaitValue}, // 11.7
		{"cuEventCreate", needed, &s.eventCreate},
		{"cuEventDestroy_v2", needed, &s.eventDestroy},
		{"cuEventRecord", needed, &s.eventRecord},
		{"cuEventQuery", needed, &s.eventQuery},
		{"cuMemAlloc_v2", needed, &s.memAlloc},
		{"cuMemFree_v2", needed, &s.memFree},
		{"cuMemGetInfo_v2", needed, &s.memInfo},
		{"cuMemGetAddressRange_v2", needed, &s.memRange},
		{"cuPointerGetAttribute", needed, &s.pointerAttribute},
		{"cuMemGetAccess", optional, &s.memAccess},                 // 10.2
		{"cuMemRetainAllocationHandle", optional, &s.memRetain},    // 11.0
		{"cuMemRelease", optional, &s.memRelease},                  // 10.2
		{"cuMemAllocFromPoolAsync", optional, &s.memAllocFromPool}, // 11.2, and so all of pools
		{"cuMemFreeAsync", optional, &s.memFreeAsync},
		{"cuMemPoolCreate", optional, &s.poolCreate},
		{"cuMemPoolDestroy", optional, &s.poolDestroy},
		{"cuMemPoolTrimTo", optional, &s.poolTrim},
		{"cuMemPoolSetAttribute", optional, &s.poolSet},
		{"cuMemPoolGetAttribute", optional, &s.poolGet},
		{"cuMemPoolSetAccess", optional, &s.poolAccess},
		{"cuMemHostRegister_v2", needed, &s.hostRegister},
		{"cuMemHostUnregister", needed, &s.hostUnregister},
		{"cuMemHostAlloc", needed, &s.hostAlloc},
		{"cuMemFreeHost", needed, &s.hostFree},
		{"cuMemHostGetDevicePointer_v2", needed, &s.hostDevicePointer},
		{"cuMemcpyHtoDAsync_v2", needed, &s.copyToDevice},
		{"cuMemcpyDtoHAsync_v2", needed, &s.copyToHost},
		{"cuMemcpyDtoDAsync_v2", needed, &s.copyOnDevice},
		{"cuMemcpyPeerAsync", needed, &s.copyPeer},
		{"cuMemsetD8Async", needed, &s.fill},
		{"cuMemcpyBatchAsync", optional, &s.copyBatch},     // 12.8
		{"cuMemcpyBatchAsync_v2", optional, &s.copyBatch2}, // 13.0
		{"cuModuleLoadData", needed, &s.moduleLoad},
		{"cuModuleGetFunction", needed, &s.moduleFunction},
		{"cuModuleUnload", needed, &s.moduleUnload},
		{"cuLaunchKernel", needed, &s.launch},
	}
}
