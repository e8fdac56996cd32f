// What the emulators share: the memory of a call, and how calls are read.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

// A block that ends where the array does, so that a step beyond it is seen.
class Array {
 public:
  Array(size_t size, size_t misaligned)
      : block_(std::malloc(size + misaligned)), data_(static_cast<char*>(block_) + misaligned) {
    std::memset(data_, 0xa5, size);
  }
  ~Array() { std::free(block_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  char* data() const { return data_; }

 private:
  void* block_;
  char* data_;
};

inline void read(void* to, size_t size) {
  if (std::fread(to, 1, size, stdin) != size) {
    std::fputs("emulator: input ended early\n", stderr);
    std::exit(2);
  }
}

// Standard input holds how many requests there are, and then them.
template <class Request>
void for_each_request(void (*run)(const Request&)) {
  int64_t count = 0;
  read(&count, sizeof(count));
  for (int64_t i = 0; i < count; ++i) {
    Request request{};
    read(&request, sizeof(request));
    run(request);
  }
}

// The mangled name of a kernel, in a program that is linked with -rdynamic.
inline std::string name_of(const void* kernel) {
  Dl_info info{};
  dladdr(kernel, &info);
  return info.dli_sname;
}
