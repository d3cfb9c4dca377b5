// Maxima over windows of planes, where they are, and their gradient.

typedef struct {
    count planes, in[2], out[2], taps[2], stride[2], pad[2], dilation[2];
} geometry;

// The pixels under the window of each output, [tap][output]; the first one again for each tap that is outside.
static void windows(const geometry *g, int32_t *pixels)
{
    const count outputs = g->out[0] * g->out[1], taps = g->taps[0] * g->taps[1];
    for (count q = 0; q < outputs; q++) {
        const count top = q / g->out[1] * g->stride[0] - g->pad[0], left = q % g->out[1] * g->stride[1] - g->pad[1];
        count missing = taps;
        for (int fill = 0; fill < 2; fill++)
            for (count t = 0, found = 0; t < taps; t++) {
                const count row = top + t / g->taps[1] * g->dilation[0], column = left + t % g->taps[1] * g->dilation[1];
                if (row < 0 || column < 0 || row >= g->in[0] || column >= g->in[1])
                    continue;
                if (!fill)
                    missing--;
                else
                    for (count at = found ? missing + found : 0; at <= missing + found; at++)
                        pixels[at * outputs + q] = row * g->in[1] + column;
                found++;
            }
    }
}

// Returns whether memory is missing.
int max_pool(const geometry *g, const REAL *restrict x, REAL *restrict y, int64_t *restrict places, count threads)
{
    const count size = g->in[0] * g->in[1], outputs = g->out[0] * g->out[1], taps = g->taps[0] * g->taps[1];
    int32_t *pixels = malloc(sizeof(int32_t) * outputs * taps);
    int missing = !pixels;
    if (pixels)
        windows(g, pixels);
#pragma omp parallel num_threads(threads) if (g->planes * size > 1 << 15)
    {
        int32_t *restrict place = malloc(sizeof(int32_t) * outputs);
        REAL *restrict value = malloc(sizeof(REAL) * outputs);
        if (!place || !value) {
#pragma omp atomic write
            missing = 1;
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (count plane = 0; plane < (missing ? 0 : g->planes); plane++) {
            const REAL *from = x + plane * size;
            REAL *restrict best = y + plane * outputs;
            for (count q = 0; q < outputs; q++) {
                best[q] = -INFINITY;
                place[q] = pixels[q];
            }
            for (count t = 0; t < taps; t++) {
                const int32_t *pixel = pixels + t * outputs;
                // Apart, so that the second loop is one of vectors.
                for (count q = 0; q < outputs; q++)
                    value[q] = from[pixel[q]];
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
