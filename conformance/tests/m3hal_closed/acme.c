/* A closed library: its own allocator, its own layout of expert weights (columns of gate and up in pairs, transposed),
   fp32, no headers of m3hal or torch. */
#include <math.h>
#include <stdlib.h>

typedef struct { int experts, inner, hidden; float *w13, *w2; } bank;

void *acme_pack(const float *w13, const float *w2, int experts, int inner, int hidden) {
    bank *b = malloc(sizeof *b);
    long first = (long)experts * 2 * inner * hidden, second = (long)experts * hidden * inner;
    b->experts = experts; b->inner = inner; b->hidden = hidden;
    b->w13 = malloc(first * sizeof(float)); b->w2 = malloc(second * sizeof(float));
    for (long e = 0; e < experts; e++)
        for (long i = 0; i < inner; i++)
            for (long h = 0; h < hidden; h++) {
                const float *from = w13 + e * 2 * inner * hidden;
                float *to = b->w13 + ((e * inner + i) * hidden + h) * 2;
                to[0] = from[i * hidden + h];
                to[1] = from[(inner + i) * hidden + h];
                b->w2[(e * inner + i) * hidden + h] = w2[(e * hidden + h) * inner + i];
            }
    return b;
}

void acme_unpack(const void *packed, float *w13, float *w2) {
    const bank *b = packed;
    for (long e = 0; e < b->experts; e++)
        for (long i = 0; i < b->inner; i++)
            for (long h = 0; h < b->hidden; h++) {
                const float *from = b->w13 + ((e * b->inner + i) * b->hidden + h) * 2;
                w13[(e * 2 * b->inner + i) * b->hidden + h] = from[0];
                w13[(e * 2 * b->inner + b->inner + i) * b->hidden + h] = from[1];
                w2[(e * b->hidden + h) * b->inner + i] = b->w2[(e * b->inner + i) * b->hidden + h];
            }
}

void acme_free(void *packed) { bank *b = packed; free(b->w13); free(b->w2); free(b); }

void acme_experts(const void *packed, const float *x, const float *weights, const int *ids, int tokens, int k,
                  float alpha, float beta, float limit, float *out) {
    const bank *b = packed;
    double *sum = malloc(b->hidden * sizeof(double));
    for (long t = 0; t < tokens; t++) {
        for (long h = 0; h < b->hidden; h++) sum[h] = 0;
        for (long j = 0; j < k; j++) {
            long e = ids[t * k + j];
            if (e < 0) continue;
            for (long i = 0; i < b->inner; i++) {
                const float *row = b->w13 + (e * b->inner + i) * b->hidden * 2;
                double gate = 0, up = 0;
                for (long h = 0; h < b->hidden; h++) {
                    gate += (double)x[t * b->hidden + h] * row[2 * h];
                    up += (double)x[t * b->hidden + h] * row[2 * h + 1];
                }
                if (gate > limit) gate = limit;
                if (up > limit) up = limit;
                if (up < -limit) up = -limit;
                double a = gate / (1 + exp(-alpha * gate)) * (up + beta) * weights[t * k + j];
                for (long h = 0; h < b->hidden; h++) sum[h] += a * b->w2[(e * b->inner + i) * b->hidden + h];
            }
        }
        for (long h = 0; h < b->hidden; h++) out[t * b->hidden + h] = (float)sum[h];
    }
    free(sum);
}

void acme_norm(const float *x, const float *weight, long rows, long width, float eps, float offset, float *out) {
    for (long r = 0; r < rows; r++) {
        double square = 0;
        for (long i = 0; i < width; i++) square += (double)x[r * width + i] * x[r * width + i];
        double scale = 1 / sqrt(square / width + eps);
        for (long i = 0; i < width; i++) out[r * width + i] = (float)(x[r * width + i] * scale * ((double)offset + weight[i]));
    }
}
