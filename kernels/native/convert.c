/* Elements that change type while they are copied: to and from fp8, as the cache-write kernels of engines do it.
 *
 * A value is the source's number, times its scale if it is fp8. If the destination is fp8, the value is divided by its
 * scale in single precision and stored by one of three rules:
 *
 * - nearest: rounded to nearest, ties to even, and saturated, infinities included. There is one NaN, 0x7F.
 * - cast: as PyTorch 2.13 casts. Rounded alike, but e5m2 has infinities, and NaN keeps its sign.
 * - truncated: multiplied by the scale's reciprocal instead of divided, and rounded toward zero. e4m3's denormals have
 *   been rounded to multiples of 2^-29 before. Infinities become the largest number of their sign, NaN the largest
 *   positive one, -0 becomes 0.
 *
 * Wider types are rounded to nearest and to infinity. All of this is integer arithmetic on the bits of a float, but for
 * the division and for denormals: adding a power of two whose last bit is a denormal's unit rounds to that unit. The
 * mirror of this file is kvconnector_kernels/relayout/triton.py, and relayout/naive.py the oracle of both.
 *
 * Every pair of types has its own function without a branch per element, so that compilers vectorise it. A choice
 * between two results is made by a mask: from `?:` gcc makes a branch, to skip the arithmetic of the result that is not
 * taken, because that might trap. Numbers are compared as signed: they are below 2^31, and SSE2 knows no other comparison.
 * Signs are set aside, since scales are above 0.
 */
#include "kvc.h"

int kvc_vectors = KVC_BASELINE;

#if defined(__x86_64__)
#include <cpuid.h>
#define WITH_AVX2 __attribute__((target("avx2")))
#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define AVX_STATE 0x06u    /* of the registers that the system saves */
#define AVX512_STATE 0xE6u
#define AVX512_FEATURES (bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL)

/* As `look_for_avx`. */
__attribute__((constructor)) static void look_for_vectors(void)
{
    unsigned eax, ebx, ecx, edx, saved, high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE))
        return;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return;
    if ((saved & AVX_STATE) == AVX_STATE && ebx & bit_AVX2)
        kvc_vectors = KVC_AVX2;
    if ((saved & AVX512_STATE) == AVX512_STATE && (ebx & AVX512_FEATURES) == AVX512_FEATURES)
        kvc_vectors = KVC_AVX512;
}
#endif

#define INLINE static inline __attribute__((always_inline))
#define INFINITE 0x7F800000u

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* All bits, or none. */
INLINE uint32_t is_less(uint32_t a, uint32_t b)
{
    return (uint32_t)-((int32_t)a < (int32_t)b);
}

INLINE uint32_t choose(uint32_t mask, uint32_t if_set, uint32_t otherwise)
{
    return (if_set & mask) | (otherwise & ~mask);
}

/* The smaller of two numbers below 2^31: vectors have an instruction for this choice, so gcc makes no branch. With a
 * mask it would compute the chosen number, a quotient, once more. */
INLINE uint32_t least_bits(uint32_t a, uint32_t b)
{
    return (int32_t)a < (int32_t)b ? a : b;
}

/* The value of a small float whose exponent has five bits or four: its magnitude moved to a float's place. From `special`
 * on it is infinite or NaN, below `normal` denormal, in multiples of `unit`. */
INLINE float widen(uint32_t sign, uint32_t magnitude, int shift, uint32_t bias, uint32_t normal, float unit,
                   uint32_t special)
{
    uint32_t bits = (magnitude << shift) + (bias << 23);
    bits = choose(is_less(magnitude, normal), bits_of((float)(int32_t)magnitude * unit), bits);
    bits |= ~is_less(magnitude, special) & INFINITE;
    return float_of(sign | bits);
}

/* The reverse of a float without its sign, with `max` the largest magnitude that is left as it is; NaN becomes `nan`. */
INLINE uint32_t narrow(uint32_t sign, float size, int shift, uint32_t bias, float smallest, float magic, float max,
                       uint32_t nan)
{
    uint32_t bits = bits_of(size), kept = least_bits(bits, bits_of(max));
    uint32_t normal = (kept + ((1u << (shift - 1)) - 1) + (kept >> shift & 1) - (bias << 23)) >> shift;
    uint32_t denormal = bits_of(float_of(kept) + magic) - bits_of(magic);
    return choose(is_less(INFINITE, bits), nan, choose(is_less(kept, bits_of(smallest)), denormal, normal) | sign);
}

/* As `narrow`, rounded toward zero: `kept` are the bits of `size`, saturated. Neither zero nor NaN keeps a sign. */
INLINE uint32_t truncate(uint32_t sign, float size, uint32_t kept, uint32_t denormal, int shift, uint32_t bias,
                         float smallest)
{
    uint32_t has_sign = is_less(0, bits_of(size)) & ~is_less(INFINITE, bits_of(size));
    uint32_t normal = (kept - (bias << 23)) >> shift;
    return choose(is_less(kept, bits_of(smallest)), denormal, normal) | (sign & has_sign);
}

INLINE float from_f16(uint16_t bits)
{
    return widen((uint32_t)(bits & 0x8000u) << 16, bits & 0x7FFFu, 13, 112, 0x400, 0x1p-24f, 0x7C00);
}

INLINE float from_bf16(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

INLINE float from_e4m3(uint8_t bits)
{
    return widen((uint32_t)(bits & 0x80u) << 24, bits & 0x7Fu, 20, 120, 8, 0x1p-9f, 0x7F);
}

INLINE float from_e5m2(uint8_t bits)
{
    return widen((uint32_t)(bits & 0x80u) << 24, bits & 0x7Fu, 21, 112, 4, 0x1p-16f, 0x7C);
}

/* The sign is 0 or 1. */
INLINE uint16_t to_f16(uint32_t sign, float size)
{
    return (uint16_t)narrow(sign << 15, size, 13, 112, 0x1p-14f, 0x1p-1f, 0x1p16f, 0x7E00);
}

INLINE uint16_t to_bf16(uint32_t sign, float size)
{
    uint32_t bits = bits_of(size), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)choose(is_less(INFINITE, bits), 0x7FC0, rounded | sign << 15);
}

INLINE uint8_t to_e4m3(uint32_t sign, float size)
{
    return (uint8_t)narrow(sign << 7, size, 20, 120, 0x1p-6f, 0x1p14f, 448.0f, 0x7F);
}

INLINE uint8_t to_e5m2(uint32_t sign, float size)
{
    return (uint8_t)narrow(sign << 7, size, 21, 112, 0x1p-14f, 0x1p7f, 57344.0f, 0x7F);
}

INLINE uint8_t to_cast_e4m3(uint32_t sign, float size)
{
    return (uint8_t)narrow(sign << 7, size, 20, 120, 0x1p-6f, 0x1p14f, 448.0f, sign << 7 | 0x7F);
}

/* Infinity follows the largest number. */
INLINE uint8_t to_cast_e5m2(uint32_t sign, float size)
{
    return (uint8_t)narrow(sign << 7, size, 21, 112, 0x1p-14f, 0x1p7f, 65536.0f, sign << 7 | 0x7F);
}

INLINE uint8_t to_truncated_e4m3(uint32_t sign, float size)
{
    uint32_t kept = least_bits(bits_of(size), bits_of(448.0f));
    uint32_t denormal = (bits_of(float_of(kept) + 0x1p-6f) - bits_of(0x1p-6f)) >> 20;
    return (uint8_t)truncate(sign << 7, size, kept, denormal, 20, 120, 0x1p-6f);
}

INLINE uint8_t to_truncated_e5m2(uint32_t sign, float size)
{
    uint32_t kept = least_bits(bits_of(size), bits_of(57344.0f));
    uint32_t small = choose(is_less(kept, bits_of(0x1p-14f)), kept, 0); /* that an integer can hold in the unit 2^-16 */
    uint32_t denormal = (uint32_t)(int32_t)(float_of(small) * 0x1p16f);
    return (uint8_t)truncate(sign << 7, size, kept, denormal, 21, 112, 0x1p-14f);
}

struct factors {
    float src, dst, reciprocal; /* the last of `dst` */
};

INLINE float undivided(float size, struct factors by)
{
    (void)by;
    return size;
}

INLINE float divided(float size, struct factors by)
{
    return size / by.dst;
}

INLINE float multiplied(float size, struct factors by)
{
    return size * by.reciprocal;
}

#define IS_SCALED_f16 0
#define IS_SCALED_bf16 0
#define IS_SCALED_e4m3 1
#define IS_SCALED_e5m2 1

#define LOOP(in, src_type, by, out, dst_type, dst_by, src_by)                                                          \
    for (int64_t index = 0; index < count; index++) {                                                                  \
        src_type number;                                                                                               \
        memcpy(&number, src + index * (src_by), sizeof number);                                                        \
        float value = from_##in(number);                                                                               \
        uint32_t bits = bits_of(IS_SCALED_##in ? value * scale.src : value);                                           \
        dst_type result = to_##out(bits >> 31, by(float_of(bits & 0x7FFFFFFFu), scale));                               \
        memcpy(dst + index * (dst_by), &result, sizeof result);                                                        \
    }

#define DEFINE_DENSE(name, in, src_type, by, out, dst_type)                                                            \
    static void name(char *restrict dst, const char *restrict src, int64_t count, struct factors scale)                \
    {                                                                                                                  \
        LOOP(in, src_type, by, out, dst_type, (int64_t)sizeof(dst_type), (int64_t)sizeof(src_type))                    \
    }

#if defined(__x86_64__)
#define DEFINE_VECTORS(in, src_type, by, out, dst_type)                                                                \
    WITH_AVX2 DEFINE_DENSE(in##_to_##out##_##by##_avx2, in, src_type, by, out, dst_type)                               \
    WITH_AVX512 DEFINE_DENSE(in##_to_##out##_##by##_avx512, in, src_type, by, out, dst_type)
#define USE_VECTORS(in, by, out)                                                                                       \
    if (kvc_vectors == KVC_AVX512) {                                                                                   \
        in##_to_##out##_##by##_avx512(dst, src, count, scale);                                                         \
        return;                                                                                                        \
    }                                                                                                                  \
    if (kvc_vectors == KVC_AVX2) {                                                                                     \
        in##_to_##out##_##by##_avx2(dst, src, count, scale);                                                           \
        return;                                                                                                        \
    }
#else
#define DEFINE_VECTORS(in, src_type, by, out, dst_type)
#define USE_VECTORS(in, by, out)
#endif

#define DEFINE(in, src_type, by, out, dst_type)                                                                        \
    DEFINE_VECTORS(in, src_type, by, out, dst_type)                                                                    \
    DEFINE_DENSE(in##_to_##out##_##by, in, src_type, by, out, dst_type)                                                \
    static void in##_to_##out(char *restrict dst, int64_t dst_step, const char *restrict src, int64_t src_step,        \
                              int64_t count, struct factors scale)                                                     \
    {                                                                                                                  \
        if (dst_step == sizeof(dst_type) && src_step == sizeof(src_type)) {                                            \
            USE_VECTORS(in, by, out)                                                                                   \
            in##_to_##out##_##by(dst, src, count, scale);                                                              \
            return;                                                                                                    \
        }                                                                                                              \
        LOOP(in, src_type, by, out, dst_type, dst_step, src_step)                                                      \
    }

#define DEFINE_FP8(in, src_type)                                                                                       \
    DEFINE(in, src_type, divided, e4m3, uint8_t)                                                                       \
    DEFINE(in, src_type, divided, e5m2, uint8_t)                                                                       \
    DEFINE(in, src_type, divided, cast_e4m3, uint8_t)                                                                  \
    DEFINE(in, src_type, divided, cast_e5m2, uint8_t)                                                                  \
    DEFINE(in, src_type, multiplied, truncated_e4m3, uint8_t)                                                          \
    DEFINE(in, src_type, multiplied, truncated_e5m2, uint8_t)

DEFINE_FP8(f16, uint16_t)
DEFINE_FP8(bf16, uint16_t)
DEFINE_FP8(e4m3, uint8_t)
DEFINE_FP8(e5m2, uint8_t)
DEFINE(e4m3, uint8_t, undivided, f16, uint16_t)
DEFINE(e4m3, uint8_t, undivided, bf16, uint16_t)
DEFINE(e5m2, uint8_t, undivided, f16, uint16_t)
DEFINE(e5m2, uint8_t, undivided, bf16, uint16_t)

int64_t kvc_element_bytes(int64_t type)
{
    return type == KVC_FLOAT16 || type == KVC_BFLOAT16 ? 2 : 1;
}

/* Convert `count` elements that lie evenly spaced on both sides. An unknown conversion is refused before it gets here. */
void kvc_convert_row(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t count, int64_t conversion,
                     struct kvc_scale scale)
{
    struct factors factors = {scale.src, scale.dst, 1 / scale.dst};
#define CASE(rule, src_type, in, dst_type, out)                                                                        \
    case KVC_CONVERSION(src_type, dst_type, rule): in##_to_##out(dst, dst_step, src, src_step, count, factors); break;
#define FP8_CASES(src_type, in)                                                                                        \
    CASE(KVC_NEAREST, src_type, in, KVC_FLOAT8_E4M3, e4m3)                                                             \
    CASE(KVC_NEAREST, src_type, in, KVC_FLOAT8_E5M2, e5m2)                                                             \
    CASE(KVC_CAST, src_type, in, KVC_FLOAT8_E4M3, cast_e4m3)                                                           \
    CASE(KVC_CAST, src_type, in, KVC_FLOAT8_E5M2, cast_e5m2)                                                           \
    CASE(KVC_TRUNCATED, src_type, in, KVC_FLOAT8_E4M3, truncated_e4m3)                                                 \
    CASE(KVC_TRUNCATED, src_type, in, KVC_FLOAT8_E5M2, truncated_e5m2)
    switch (conversion) {
        FP8_CASES(KVC_FLOAT16, f16)
        FP8_CASES(KVC_BFLOAT16, bf16)
        FP8_CASES(KVC_FLOAT8_E4M3, e4m3)
        FP8_CASES(KVC_FLOAT8_E5M2, e5m2)
        CASE(KVC_NEAREST, KVC_FLOAT8_E4M3, e4m3, KVC_FLOAT16, f16)
        CASE(KVC_NEAREST, KVC_FLOAT8_E4M3, e4m3, KVC_BFLOAT16, bf16)
        CASE(KVC_NEAREST, KVC_FLOAT8_E5M2, e5m2, KVC_FLOAT16, f16)
        CASE(KVC_NEAREST, KVC_FLOAT8_E5M2, e5m2, KVC_BFLOAT16, bf16)
    }
#undef FP8_CASES
#undef CASE
}
