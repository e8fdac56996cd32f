// Bad indices that a CUDA kernel met and nobody has been told of yet.
#pragma once

namespace maxunpool_cuda {

#ifdef WITH_CUDA
// Waits for every device that has run a kernel of ours, and raises what it reported.
void check_errors();
#else
inline void check_errors() {} // CPU kernels raise at once
#endif

} // namespace maxunpool_cuda
