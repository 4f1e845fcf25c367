/* Elements that change type while they are copied: to and from fp8, as the cache-write kernels of engines do it.
 *
 * A value is the source's number, times its scale if it is fp8. It is divided by the destination's scale if that is fp8,
 * in single precision, and rounded to nearest, ties to even. fp8 saturates, infinities included, and has one NaN, 0x7F;
 * wider types round to infinity. The sign of zero is kept. All of this is integer arithmetic on the bits of a float, but
 * for the division and for denormals: adding a power of two whose last bit is a denormal's unit rounds to that unit.
 * The mirror of this file is kvconnector_kernels/relayout/triton.py, and relayout/naive.py the oracle of both.
 *
 * Every pair of types is a function of its own without a branch per element, so that compilers make vectors of it. A
 * choice between two results is a mask: of `?:` gcc makes a branch, to leave out the arithmetic of the result that is not
 * taken, since that might trap. Numbers are compared as signed: they are below 2^31, and SSE2 knows no other comparison.
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

/* The reverse, with `max` the largest magnitude that is left as it is, in a float's bits; NaN becomes `nan`. */
INLINE uint32_t narrow(float value, int shift, uint32_t bias, float smallest, float magic, float max, uint32_t nan,
                       uint32_t sign_bit)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFFu;
    uint32_t kept = choose(is_less(magnitude, bits_of(max)), magnitude, bits_of(max));
    uint32_t normal = (kept + ((1u << (shift - 1)) - 1) + (kept >> shift & 1) - (bias << 23)) >> shift;
    uint32_t denormal = bits_of(float_of(kept) + magic) - bits_of(magic);
    uint32_t found = choose(is_less(kept, bits_of(smallest)), denormal, normal) | (bits >> 31) * sign_bit;
    return choose(is_less(INFINITE, magnitude), nan, found);
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

INLINE uint16_t to_f16(float value)
{
    return (uint16_t)narrow(value, 13, 112, 0x1p-14f, 0x1p-1f, 0x1p16f, 0x7E00, 0x8000);
}

INLINE uint16_t to_bf16(float value)
{
    uint32_t bits = bits_of(value), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)choose(is_less(INFINITE, bits & 0x7FFFFFFFu), 0x7FC0, rounded);
}

INLINE uint8_t to_e4m3(float value)
{
    return (uint8_t)narrow(value, 20, 120, 0x1p-6f, 0x1p14f, 448.0f, 0x7F, 0x80);
}

INLINE uint8_t to_e5m2(float value)
{
    return (uint8_t)narrow(value, 21, 112, 0x1p-14f, 0x1p7f, 57344.0f, 0x7F, 0x80);
}

#define LOOP(in, src_type, src_is_scaled, out, dst_type, dst_is_scaled, dst_by, src_by)                                \
    for (int64_t index = 0; index < count; index++) {                                                                  \
        src_type number;                                                                                               \
        memcpy(&number, src + index * (src_by), sizeof number);                                                        \
        float value = from_##in(number);                                                                               \
        value = src_is_scaled ? value * scale.src : value;                                                             \
        value = dst_is_scaled ? value / scale.dst : value;                                                             \
        dst_type result = to_##out(value);                                                                             \
        memcpy(dst + index * (dst_by), &result, sizeof result);                                                        \
    }

#define DEFINE_DENSE(name, in, src_type, src_is_scaled, out, dst_type, dst_is_scaled)                                  \
    static void name(char *restrict dst, const char *restrict src, int64_t count, struct kvc_scale scale)              \
    {                                                                                                                  \
        LOOP(in, src_type, src_is_scaled, out, dst_type, dst_is_scaled, (int64_t)sizeof(dst_type),                     \
             (int64_t)sizeof(src_type))                                                                                \
    }

#if defined(__x86_64__)
#define DEFINE_VECTORS(in, src_type, src_is_scaled, out, dst_type, dst_is_scaled)                                      \
    WITH_AVX2 DEFINE_DENSE(in##_to_##out##_avx2, in, src_type, src_is_scaled, out, dst_type, dst_is_scaled)            \
    WITH_AVX512 DEFINE_DENSE(in##_to_##out##_avx512, in, src_type, src_is_scaled, out, dst_type, dst_is_scaled)
#define USE_VECTORS(in, out)                                                                                           \
    if (kvc_vectors == KVC_AVX512) {                                                                                   \
        in##_to_##out##_avx512(dst, src, count, scale);                                                                \
        return;                                                                                                        \
    }                                                                                                                  \
    if (kvc_vectors == KVC_AVX2) {                                                                                     \
        in##_to_##out##_avx2(dst, src, count, scale);                                                                  \
        return;                                                                                                        \
    }
#else
#define DEFINE_VECTORS(in, src_type, src_is_scaled, out, dst_type, dst_is_scaled)
#define USE_VECTORS(in, out)
#endif

#define DEFINE(in, src_type, src_is_scaled, out, dst_type, dst_is_scaled)                                              \
    DEFINE_VECTORS(in, src_type, src_is_scaled, out, dst_type, dst_is_scaled)                                          \
    DEFINE_DENSE(in##_to_##out##_dense, in, src_type, src_is_scaled, out, dst_type, dst_is_scaled)                     \
    static void in##_to_##out(char *restrict dst, int64_t dst_step, const char *restrict src, int64_t src_step,        \
                              int64_t count, struct kvc_scale scale)                                                   \
    {                                                                                                                  \
        if (dst_step == sizeof(dst_type) && src_step == sizeof(src_type)) {                                            \
            USE_VECTORS(in, out)                                                                                       \
            in##_to_##out##_dense(dst, src, count, scale);                                                             \
            return;                                                                                                    \
        }                                                                                                              \
        LOOP(in, src_type, src_is_scaled, out, dst_type, dst_is_scaled, dst_step, src_step)                            \
    }

DEFINE(f16, uint16_t, 0, e4m3, uint8_t, 1)
DEFINE(f16, uint16_t, 0, e5m2, uint8_t, 1)
DEFINE(bf16, uint16_t, 0, e4m3, uint8_t, 1)
DEFINE(bf16, uint16_t, 0, e5m2, uint8_t, 1)
DEFINE(e4m3, uint8_t, 1, f16, uint16_t, 0)
DEFINE(e4m3, uint8_t, 1, bf16, uint16_t, 0)
DEFINE(e4m3, uint8_t, 1, e4m3, uint8_t, 1)
DEFINE(e4m3, uint8_t, 1, e5m2, uint8_t, 1)
DEFINE(e5m2, uint8_t, 1, f16, uint16_t, 0)
DEFINE(e5m2, uint8_t, 1, bf16, uint16_t, 0)
DEFINE(e5m2, uint8_t, 1, e4m3, uint8_t, 1)
DEFINE(e5m2, uint8_t, 1, e5m2, uint8_t, 1)

int64_t kvc_element_bytes(int64_t type)
{
    return type == KVC_FLOAT16 || type == KVC_BFLOAT16 ? 2 : 1;
}

/* Convert `count` elements that lie evenly spaced on both sides. An unknown conversion is refused before it gets here. */
void kvc_convert_row(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t count, int64_t conversion,
                     struct kvc_scale scale)
{
#define CASE(src_type, in, dst_type, out)                                                                              \
    case KVC_CONVERSION(src_type, dst_type): in##_to_##out(dst, dst_step, src, src_step, count, scale); break;
    switch (conversion) {
        CASE(KVC_FLOAT16, f16, KVC_FLOAT8_E4M3, e4m3)
        CASE(KVC_FLOAT16, f16, KVC_FLOAT8_E5M2, e5m2)
        CASE(KVC_BFLOAT16, bf16, KVC_FLOAT8_E4M3, e4m3)
        CASE(KVC_BFLOAT16, bf16, KVC_FLOAT8_E5M2, e5m2)
        CASE(KVC_FLOAT8_E4M3, e4m3, KVC_FLOAT16, f16)
        CASE(KVC_FLOAT8_E4M3, e4m3, KVC_BFLOAT16, bf16)
        CASE(KVC_FLOAT8_E4M3, e4m3, KVC_FLOAT8_E4M3, e4m3)
        CASE(KVC_FLOAT8_E4M3, e4m3, KVC_FLOAT8_E5M2, e5m2)
        CASE(KVC_FLOAT8_E5M2, e5m2, KVC_FLOAT16, f16)
        CASE(KVC_FLOAT8_E5M2, e5m2, KVC_BFLOAT16, bf16)
        CASE(KVC_FLOAT8_E5M2, e5m2, KVC_FLOAT8_E4M3, e4m3)
        CASE(KVC_FLOAT8_E5M2, e5m2, KVC_FLOAT8_E5M2, e5m2)
    }
#undef CASE
}
