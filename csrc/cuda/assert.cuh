// SPDX-License-Identifier: BSD-3-Clause
// MAXUNPOOL_ASSERT: what kernels take for granted. It is checked in builds with DEBUG=1 (setup.py),
// for which nvcc compiles device code with -G, and where a C++ compiler compiles the kernels for
// the CPU. Else it costs nothing: the condition is not evaluated.
//
// Example: MAXUNPOOL_ASSERT(i < items); a thread for which this is wrong prints the file, the line
// and the condition, and every later call of CUDA fails with cudaErrorAssert.
#pragma once

#if defined(__CUDA_ARCH__) && !defined(__CUDACC_DEBUG__)
#define MAXUNPOOL_ASSERT(condition) static_cast<void>(0)
#else
#include <cassert>
#define MAXUNPOOL_ASSERT(condition) assert(condition)
#endif
