// Maxima over windows of planes, where they are, and their gradient.

typedef struct {
    count planes, in[2], out[2], taps[2], stride[2], pad[2], dilation[2];
} geometry;

// The pixels under the window of each output, [tap][output]; the first one inside for each tap that is outside.
static void windows(const geometry *g, int32_t *pixels)
{
    const count outputs = g->out[0] * g->out[1], taps = g->taps[0] * g->taps[1];
    for (count q = 0; q < outputs; q++) {
        const count top = q / g->out[1] * g->stride[0] - g->pad[0], left = q % g->out[1] * g->stride[1] - g->pad[1];
        int32_t first = -1;
        // Twice, as the first one may come after taps outside.
        for (count n = 0; n < 2 * taps; n++) {
            const count t = n % taps, row = top + t / g->taps[1] * g->dilation[0];
            const count column = left + t % g->taps[1] * g->dilation[1];
            const int inside = row >= 0 && column >= 0 && row < g->in[0] && column < g->in[1];
            if (inside && first < 0)
                first = row * g->in[1] + column;
            pixels[t * outputs + q] = inside ? row * g->in[1] + column : AT_LEAST(first, 0);
        }
    }
}

// The pixels under one tap of all windows; compilers make vectors of steps that they know.
INLINE void taken(const geometry *g, const REAL *restrict from, count below, const count step, REAL *restrict value)
{
    for (count row = 0; row < g->out[0]; row++, from += below, value += g->out[1])
        for (count column = 0; column < g->out[1]; column++)
            value[column] = from[column * step];
}

// Returns whether memory is missing.
int max_pool(const geometry *g, const REAL *restrict x, REAL *restrict y, int64_t *restrict places, count threads)
{
    const count size = g->in[0] * g->in[1], outputs = g->out[0] * g->out[1], taps = g->taps[0] * g->taps[1];
    // What windows cover, and how much of it the plane fills from the padding on.
    count covered[2], filled[2];
    for (int axis = 0; axis < 2; axis++) {
        covered[axis] = (g->out[axis] - 1) * g->stride[axis] + (g->taps[axis] - 1) * g->dilation[axis] + 1;
        filled[axis] = AT_MOST(g->in[axis], covered[axis] - g->pad[axis]);
    }
    const int padded = g->pad[0] || g->pad[1] || covered[0] > g->in[0] || covered[1] > g->in[1];
    const count width = padded ? covered[1] : g->in[1], around = padded ? covered[0] * covered[1] : 0;
    int32_t *pixels = malloc(sizeof(int32_t) * outputs * taps);
    int missing = !pixels;
    if (pixels)
        windows(g, pixels);
#pragma omp parallel num_threads(threads) if (g->planes * size > 1 << 15)
    {
        int32_t *restrict place = malloc(sizeof(int32_t) * outputs);
        // The pixels under a tap, and the plane with what is around it.
        REAL *restrict value = malloc(sizeof(REAL) * (outputs + around)), *plain = value + outputs;
        if (!place || !value) {
#pragma omp atomic write
            missing = 1;
        } else
            for (count i = 0; i < around; i++)
                plain[i] = -INFINITY;
#pragma omp barrier
#pragma omp for schedule(static)
        for (count plane = 0; plane < (missing ? 0 : g->planes); plane++) {
            const REAL *from = x + plane * size;
            if (padded) {
                REAL *into = plain + g->pad[0] * width + g->pad[1];
                for (count row = 0; row < filled[0]; row++)
                    memcpy(into + row * width, from + row * g->in[1], sizeof(REAL) * filled[1]);
                from = plain;
            }
            REAL *restrict best = y + plane * outputs;
            for (count q = 0; q < outputs; q++) {
                best[q] = -INFINITY;
                place[q] = pixels[q];
            }
            for (count t = 0; t < taps; t++) {
                const int32_t *pixel = pixels + t * outputs;
                const REAL *tap = from + t / g->taps[1] * g->dilation[0] * width + t % g->taps[1] * g->dilation[1];
                // Apart, so that the second loop is one of vectors.
                if (g->stride[1] == 1)
                    taken(g, tap, g->stride[0] * width, 1, value);
                else if (g->stride[1] == 2)
                    taken(g, tap, g->stride[0] * width, 2, value);
                else
                    taken(g, tap, g->stride[0] * width, g->stride[1], value);
                for (count q = 0; q < outputs; q++) {
                    // A NaN is larger than any number.
                    const int better = (value[q] > best[q]) | (value[q] != value[q]);
                    best[q] = better ? value[q] : best[q];
                    place[q] = better ? pixel[q] : place[q];
                }
            }
            for (count q = 0; q < outputs; q++)
                places[plane * outputs + q] = place[q];
        }
        free(place);
        free(value);
    }
    free(pixels);
    return missing;
}

void max_pool_backward(count planes, count size, count outputs, const REAL *restrict grad, const int64_t *restrict places,
                       REAL *restrict dx, count threads)
{
#pragma omp parallel for num_threads(threads) if (planes * size > 1 << 15) schedule(static)
    for (count plane = 0; plane < planes; plane++) {
        REAL *restrict into = dx + plane * size;
        memset(into, 0, sizeof(REAL) * size);
        for (count q = plane * outputs; q < (plane + 1) * outputs; q++)
            into[places[q]] += grad[q];
    }
}
