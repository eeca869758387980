// Philox4x32-10, a counter-based random number generator: Salmon, Moraes, Dror and Shaw, "Parallel Random
// Numbers: As Easy as 1, 2, 3" (SC'11).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

struct Words {
  uint32_t of[4];
};

// The 64-bit product of two 32-bit factors, by one mul.wide.u32. From a product of 64-bit numbers the
// compiler does not see that the factors have 32 bits, and adds partial products that are always 0: a third
// of the generator's instructions.
__host__ __device__ inline uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

// Four words from a counter and a key. Stateless, so the backward pass can draw the same words again.
__host__ __device__ inline Words philox4x32(Words counter, uint32_t key_low, uint32_t key_high) {
  constexpr uint32_t MULTIPLIERS[] = {0xD2511F53, 0xCD9E8D57};
  constexpr uint32_t KEY_STEPS[] = {0x9E3779B9, 0xBB67AE85};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int turn = 0; turn < 10; ++turn) {
    const auto [c0, c1, c2, c3] = counter.of;
    const uint64_t product0 = wide_product(c0, MULTIPLIERS[0]);
    const uint64_t product1 = wide_product(c2, MULTIPLIERS[1]);
    counter = {static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key_low, static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key_high, static_cast<uint32_t>(product0)};
    key_low += KEY_STEPS[0];
    key_high += KEY_STEPS[1];
  }
  return counter;
}

// The words of elements 4 * block to 4 * block + 3. cuRAND and PyTorch give the same words to the thread of
// that number, for this seed and this offset, which counts words and is a multiple of 4. So no draw at
// another offset of the same generator has any of them.
__host__ __device__ inline Words random_words(uint64_t seed, uint64_t offset, uint64_t block) {
  offset /= 4;
  return philox4x32({static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32),
                     static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32)},
                    static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}
