// A growing array aligned for the kernels. Contents are lost when it grows.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

namespace trivet {

template <typename T>
constexpr T round_up(T value, std::type_identity_t<T> multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

template <typename T>
class Buffer {
  public:
    Buffer() = default;
    ~Buffer() { std::free(data_); }
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }

    // At least `size` elements, 64-byte aligned. Throws std::bad_alloc.
    void reserve(int64_t size) {
        if (size <= size_) return;
        const size_t bytes = (static_cast<size_t>(size) * sizeof(T) + 63) / 64 * 64;
        void* grown = std::aligned_alloc(64, bytes);
        if (grown == nullptr) throw std::bad_alloc();
        std::free(data_);
        data_ = static_cast<T*>(grown);
        size_ = size;
    }

    T* data() { return data_; }
    const T* data() const { return data_; }
    int64_t size() const { return size_; }

  private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace trivet
