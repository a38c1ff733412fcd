// How fast AVX2 can multiply codes: `vpmaddubsw` alone, with the additions of its 16-bit sums, with the loads that a
// prompt's product makes, and beside FP32. Prints 10^9 products of two bytes a second on one thread, and the share of
// what the instruction reaches alone. Run by units.sh.
#include "units.h"

namespace {

#define PRODUCT(codes, row, to) "vpmaddubsw %%ymm" #row ", %%ymm" #codes ", %%ymm" #to "\n"
#define ADDED(codes, row, to, sum) PRODUCT(codes, row, to) "vpaddw %%ymm" #to ", %%ymm" #sum ", %%ymm" #sum "\n"
#define BESIDE(codes, row, to, sum) PRODUCT(codes, row, to) "vfmadd231ps %%ymm4, %%ymm5, %%ymm" #sum "\n"
#define ALONE(codes, row, to, sum) PRODUCT(codes, row, to)
// Eight products: two vectors of codes (4, 5) and a word of each of four rows (0 to 3).
#define EIGHT(each)                                                                                  \
  each(4, 0, 6, 8) each(5, 0, 7, 9) each(4, 1, 6, 10) each(5, 1, 7, 11) each(4, 2, 6, 12) each(5, 2, 7, 13) \
      each(4, 3, 6, 14) each(5, 3, 7, 15)
#define LOADS                                                                                        \
  "vpbroadcastd (%1), %%ymm0\nvpbroadcastd 32(%1), %%ymm1\nvpbroadcastd 64(%1), %%ymm2\n"            \
  "vpbroadcastd 96(%1), %%ymm3\nvmovdqu 128(%1), %%ymm4\nvmovdqu 160(%1), %%ymm5\n"

constexpr long kRounds = 8000;
constexpr double kProducts = 8.0 * 32 * kRounds;

#define KERNEL(name, body)                                                                                          \
  void name(const void* line) {                                                                                     \
    long rounds = kRounds;                                                                                          \
    asm volatile("1:\n" body "dec %0\njnz 1b\n"                                                                     \
                 : "+r"(rounds)                                                                                     \
                 : "r"(line)                                                                                        \
                 : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",   \
                   "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                                    \
  }

KERNEL(alone, EIGHT(ALONE))
KERNEL(added, EIGHT(ADDED))
KERNEL(loaded, LOADS EIGHT(ADDED))
KERNEL(with_fma, EIGHT(BESIDE))

}  // namespace

int main() {
  const units::Speeds speeds(kProducts, alone);
  speeds.print("8 vpmaddubsw", alone);
  speeds.print("each with a vpaddw", added);
  speeds.print("and 6 loads: the step of a product with 4 rows", loaded);
  speeds.print("each with a vfmadd231ps instead", with_fma);
}
