// The memory of an emulated call, and where it is read from.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

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
