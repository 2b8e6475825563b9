// Elements of a tensor of any dtype as float or double.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

// As in csrc_triton/address_layout.py.
enum DtypeCode : int64_t { fp32 = 0, bf16 = 1, fp16 = 2, fp64 = 3, fp8_e4m3 = 4, fp8_e5m2 = 5 };

template <typename To, typename From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline bool is_fp8(int64_t code) {
  return code == fp8_e4m3 || code == fp8_e5m2;
}

inline int64_t bytes_of(int64_t code) {
  return code == fp64 ? 8 : code == fp32 ? 4 : code < fp64 ? 2 : 1;
}

inline float decode_bf16(uint16_t bits) {
  return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// By the bits: not every processor has an instruction for it. Exact, subnormals included, also where
// the processor takes subnormal operands for 0.
inline float decode_fp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7FFFu) << 13;
  const uint32_t exponent = bits & 0x7C00u;
  const uint32_t rebias = exponent == 0x7C00u ? 224u << 23 : 112u << 23;
  const float subnormal = static_cast<float>(static_cast<int32_t>(bits & 0x03FFu)) * 0x1p-24f;
  const float value = exponent == 0 ? subnormal : bit_cast<float>(magnitude + rebias);
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
}

inline float decode_e4m3(uint8_t bits) {
  if ((bits & 0x7Fu) == 0x7Fu) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  const uint32_t half = (static_cast<uint32_t>(bits & 0x80u) << 8) | ((bits & 0x7Fu) << 7);
  return decode_fp16(static_cast<uint16_t>(half)) * 256.0f;
}

// Calls `with(read)`, where `read(offset)` is an element of the tensor at `address`.
template <typename With>
void with_reader(int64_t address, int64_t code, With with) {
  const auto* memory = reinterpret_cast<const char*>(address);
  switch (code) {
    case fp32:
      return with([p = reinterpret_cast<const float*>(memory)](int64_t i) { return p[i]; });
    case bf16:
      return with([p = reinterpret_cast<const uint16_t*>(memory)](int64_t i) {
        return decode_bf16(p[i]);
      });
    case fp16:
      return with([p = reinterpret_cast<const uint16_t*>(memory)](int64_t i) {
        return decode_fp16(p[i]);
      });
    case fp64:
      return with([p = reinterpret_cast<const double*>(memory)](int64_t i) { return p[i]; });
    case fp8_e4m3:
      return with([p = reinterpret_cast<const uint8_t*>(memory)](int64_t i) {
        return decode_e4m3(p[i]);
      });
    default:
      return with([p = reinterpret_cast<const uint8_t*>(memory)](int64_t i) {
        return decode_fp16(static_cast<uint16_t>(p[i] << 8));
      });
  }
}
