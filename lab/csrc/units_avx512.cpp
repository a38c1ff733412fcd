// Which instructions of decode take turns with `vpdpbusd` and which run beside
// it: 16 independent products, alone and with four of each other kind among
// them. Prints 10^9 products of two bytes a second on one thread, and the share
// of what they reach alone. AVX-512 VNNI and GFNI; run by units.sh.
#include "units.h"

namespace {

#define PRODUCT(sum) "vpdpbusd %%zmm31, %%zmm30, %%zmm" #sum "\n"
#define PRODUCTS(a, b, c, d) PRODUCT(a) PRODUCT(b) PRODUCT(c) PRODUCT(d)
#define ROUND(beside)  \
  PRODUCTS(0, 1, 2, 3) \
  beside(16) PRODUCTS(4, 5, 6, 7) beside(17) PRODUCTS(8, 9, 10, 11) beside(18) PRODUCTS(12, 13, 14, 15) beside(19)

#define NOTHING(to)
#define AND(to) "vpandd %%zmm29, %%zmm30, %%zmm" #to "\n"
#define SHIFT(to) "vpsrlw $2, %%zmm30, %%zmm" #to "\n"
#define BROADCAST(to) "vpbroadcastd (%1), %%zmm" #to "\n"
#define LOAD(to) "vmovdqu64 (%1), %%zmm" #to "\n"
#define LOADS(to) LOAD(to) LOAD(to) LOAD(to) LOAD(to)
#define BROADCASTS(to) BROADCAST(to) BROADCAST(to) BROADCAST(to) BROADCAST(to)
#define UNPACK(to) SHIFT(to) AND(to) BROADCAST(to)
#define AFFINE(to) "vgf2p8affineqb $0, %%zmm29, %%zmm30, %%zmm" #to "\n"
#define FMA(to) "vfmadd231ps %%zmm29, %%zmm28, %%zmm" #to "\n"
#define ADD(to) "vaddps %%zmm29, %%zmm28, %%zmm" #to "\n"
#define CONVERT(to) "vcvtdq2ps %%zmm28, %%zmm" #to "\n"
#define SCALE(to) "vscalefps %%zmm29, %%zmm28, %%zmm" #to "\n"

constexpr long kRounds = 4000;
constexpr double kProducts = 16.0 * 64 * kRounds;

#define KERNEL(name, beside)                                                                                          \
  void name(const void* line) {                                                                                       \
    long rounds = kRounds;                                                                                            \
    asm volatile("1:\n" ROUND(beside) "dec %0\njnz 1b\n"                                                              \
                 : "+r"(rounds)                                                                                       \
                 : "r"(line)                                                                                          \
                 : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",     \
                   "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm28", "xmm29", \
                   "xmm30", "xmm31");                                                                                 \
  }

KERNEL(alone, NOTHING)
KERNEL(with_loads, LOADS)
KERNEL(with_broadcasts, BROADCASTS)
KERNEL(with_unpack, UNPACK)
KERNEL(with_affine, AFFINE)
KERNEL(with_fma, FMA)
KERNEL(with_add, ADD)
KERNEL(with_convert, CONVERT)
KERNEL(with_scale, SCALE)

}  // namespace

int main() {
  asm volatile(
      "vpxord %%zmm28, %%zmm28, %%zmm28\nvpxord %%zmm29, %%zmm29, %%zmm29\n"
      "vpxord %%zmm30, %%zmm30, %%zmm30\nvpxord %%zmm31, %%zmm31, %%zmm31\n" ::
          : "xmm28", "xmm29", "xmm30", "xmm31");
  const units::Speeds speeds(kProducts, alone);
  speeds.print("16 vpdpbusd", alone);
  speeds.print("with 16 loads of 64 bytes", with_loads);
  speeds.print("with 16 vpbroadcastd from memory", with_broadcasts);
  speeds.print("with 4 each of vpsrlw, vpandd, vpbroadcastd", with_unpack);
  speeds.print("with 4 vgf2p8affineqb", with_affine);
  speeds.print("with 4 vfmadd231ps", with_fma);
  speeds.print("with 4 vaddps", with_add);
  speeds.print("with 4 vcvtdq2ps", with_convert);
  speeds.print("with 4 vscalefps", with_scale);
}
