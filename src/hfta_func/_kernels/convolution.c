// Convolutions of M members.
//
// Images are copied into a buffer with their padding, so that every output is a sum over one list of places, of any channels,
// taps, strides and dilations, without a condition. There are two layouts. Either a lane of vectors is a band of rows of one
// sample: [channel][pixel][lane]. Or vectors are runs of neighbours in a row of one sample, which needs no transposition, but
// rows that fill vectors: [channel][row][column], where a stride puts columns that are read together next to each other.
//
// "Big" and "small" are the two sides of a convolution with a stride: a filter gathers pixels of the big image for each pixel
// of the small one, or scatters the small one's onto the big one. Filters are [group, small channel][big channel][tap].

// How many pixels of 1 to 6 channels the registers can add up at a time.
#if REGISTERS == 32
#define EACH(DO) DO(1, 9) DO(2, 8) DO(3, 8) DO(4, 6) DO(5, 5) DO(6, 4)
#else
#define EACH(DO) DO(1, 8) DO(2, 5) DO(3, 4) DO(4, 3) DO(5, 2) DO(6, 2)
#endif
#define MOST 6
// What is read again soon should still be in the first-level cache.
#define PIXELS_AT_ONCE 48

typedef struct {
    count models, batch, groups, ins, outs;       // channels of one group that are read and written
    count in_model, in_sample;                    // strides; the rest of an image is contiguous
    count weight_out, weight_in;                  // strides of the filters' channels
    count axis, scatters;                         // the axis that is cut into bands
    count in[3], out[3], taps[3], stride[3], pad[3], dilation[3];
} geometry;

// One axis of a band: the outputs, and the window of inputs under them, which moves with the band.
typedef struct {
    count outs, low, size, move;
} window;

// A band of all axes. Buffers have room for one more pixel of each image, where those outside of the window go. If vectors are
// runs of a row, "pixels" are vectors: so many a row, whose columns of the same remainder by the stride are `apart` numbers.
typedef struct {
    count bands, chunks, in_pixels, out_pixels, vectors, apart;
    window axes[3];
} layout;

// The input under tap k of output q, or none.
INLINE int under(const geometry *g, int a, count q, count k, count *at)
{
    const count place = g->scatters ? q + g->pad[a] - k * g->dilation[a] : q * g->stride[a] + k * g->dilation[a] - g->pad[a];
    *at = place;
    if (!g->scatters)
        return 1;
    if ((place % g->stride[a] + g->stride[a]) % g->stride[a])
        return 0;
    *at = place / g->stride[a];
    return 1;
}

static layout laid_out(const geometry *g, count rows)
{
    layout l = {1, 0, 1, 1, 0, 0, {{0}}};
    for (int a = 0; a < 3; a++) {
        window *w = &l.axes[a];
        count low = INT64_MAX, high = INT64_MIN, at;
        w->outs = a == g->axis ? rows : g->out[a];
        const count edge = g->scatters ? AT_MOST(g->stride[a], w->outs) : 1;
        for (count k = 0; k < g->taps[a]; k++)
            for (count q = 0; q < edge; q++) {
                if (under(g, a, q, k, &at))
                    low = AT_MOST(low, at);
                if (under(g, a, w->outs - 1 - q, k, &at))
                    high = AT_LEAST(high, at);
            }
        w->low = high < low ? 0 : low;
        w->size = high < low ? 1 : high - low + 1;
        w->move = g->scatters ? rows / g->stride[a] : rows * g->stride[a];
        l.in_pixels *= w->size;
        l.out_pixels *= w->outs;
    }
    l.in_pixels++;
    l.bands = (g->out[g->axis] + rows - 1) / rows;
    l.chunks = (g->batch * l.bands + LANES - 1) / LANES;
    return l;
}

INLINE count stride_of_row(const geometry *g) { return g->scatters ? 1 : g->stride[2]; }
// Whether the buffer of outputs is as a sample of theirs is.
INLINE int is_tight(const geometry *g, const layout *l) { return l->vectors && g->out[2] % LANES == 0; }
INLINE count pitch(const geometry *g, const layout *l) { return l->apart * stride_of_row(g); }

// The layout whose vectors are runs of a row.
static layout laid_in_rows(const geometry *g)
{
    layout l = laid_out(g, g->out[g->axis]);
    const window *w = l.axes;
    l.vectors = (w[2].outs + LANES - 1) / LANES;
    l.apart = l.vectors * LANES + g->dilation[2] * (g->taps[2] - 1) / stride_of_row(g) + 1;
    l.in_pixels = w[0].size * w[1].size * pitch(g, &l) / LANES + 1;
    l.out_pixels = w[0].outs * w[1].outs * l.vectors;
    l.chunks = g->batch;
    return l;
}

// The bands by which the lanes are well filled and buffers stay in the second-level cache. Nothing else may matter, so that
// sums are in the same order in every array.
static layout best_layout(const geometry *g, int adds_up)
{
    const count rows = g->out[g->axis], step = g->scatters ? g->stride[g->axis] : 1;
    count taps = g->taps[0] * g->taps[1] * g->taps[2];
    if (g->scatters)
        taps = taps / (g->stride[0] * g->stride[1] * g->stride[2]) + 1;
    layout best = {0};
    double least = 0, copies = 0;
    for (count bands = 1; bands <= rows; bands++) {
        count each = (rows + bands - 1) / bands;
        each = bands == 1 ? rows : (each + step - 1) / step * step;
        const layout l = laid_out(g, each);
        if (bands > 1 && l.bands < bands)
            continue;
        const double in = (double)l.in_pixels * g->groups * g->ins, out = (double)l.out_pixels * g->groups * g->outs;
        // Cycles: a copy of a vector takes about six, half a multiplication one.
        double cycles = l.chunks * (6 * (in + out) + 0.6 * out * g->ins * taps);
        if ((in + out) * BYTES > 600e3)
            cycles *= 1.5;
        if (!best.bands || cycles < 0.97 * least) {
            best = l;
            least = cycles;
            copies = l.chunks * (in + out);
        }
        if (bands >= 64)
            break;
    }
    if (g->scatters && g->stride[0] * g->stride[1] * g->stride[2] > 1)
        return best;
    const layout l = laid_in_rows(g);
    const double in = (double)l.in_pixels * g->groups * g->ins, out = (double)l.out_pixels * g->groups * g->outs;
    // Transpositions take twice as long where little is computed between them, and loads of vectors from anywhere longer than
    // of aligned ones. Sums over pixels are read and written for every few of them.
    const double each = adds_up ? 0.75 + 2.0 / AT_MOST(l.out_pixels, PIXELS_AT_ONCE) : 0.75;
    const double cycles = l.chunks * (1.5 * (in * stride_of_row(g) + out) + each * out * g->ins * taps);
    return cycles < least + 4 * copies ? l : best;
}

// Where lanes begin in a member's images, and which part of a run of pixels they have.
typedef struct {
    count at[LANES], room[LANES], low[LANES], high[LANES];
} lanes;

static lanes lanes_of(count chunk, const layout *l, count batch, count sample, count channels, count image, count slab, count low,
                      count move, count rows, count all_rows)
{
    lanes s;
    for (int i = 0; i < LANES; i++) {
        const count v = chunk * LANES + i, n = v / l->bands, first = l->bands == 1 ? 0 : v % l->bands * move + low;
        s.at[i] = n * sample + first * slab;
        s.room[i] = channels * image - first * slab;
        s.low[i] = first < 0 ? -first * slab : 0;
        s.high[i] = n >= batch ? 0 : l->bands == 1 ? channels * image : AT_MOST(rows, all_rows - first) * slab;
        if (s.high[i] <= s.low[i])
            s.high[i] = s.low[i] = 0;
    }
    return s;
}

// One side of a convolution, of which runs of contiguous pixels are copied: a channel of a band, or the whole sample.
typedef struct {
    count runs, length, image, slab, total; // pixels of an image; of one row of it; numbers of a sample
    count *places;                          // in the buffer, of each pixel of a run
    count step;                             // in the buffer, from run to run
} copied;

static void copy_in(const REAL *restrict from, const lanes *s, const copied *c, REAL *restrict into)
{
    for (count run = 0; run < c->runs; run++)
        for (count j = 0; j < c->length; j += LANES) {
            const count end = AT_MOST(j + LANES, c->length);
            vec rows[LANES];
            for (int i = 0; i < LANES; i++) {
                const count at = run * c->image + j, low = s->low[i], high = s->high[i];
                // So many streams are more than a processor foresees.
                __builtin_prefetch(from + s->at[i] + at + 8 * LANES);
                rows[i] = (vec){0};
                if (j >= low && end <= high && at + LANES <= s->room[i])
                    rows[i] = (vec) * (const loose *)(from + s->at[i] + at);
                else
                    for (count k = AT_LEAST(j, low); k < AT_MOST(end, high); k++)
                        ((REAL *)&rows[i])[k - j] = from[s->at[i] + at - j + k];
            }
            transpose(rows);
            for (count k = j; k < end; k++)
                *(vec *)(into + run * c->step + c->places[k]) = rows[k - j];
        }
}

static void copy_out(const REAL *restrict from, const lanes *s, const copied *c, REAL *restrict into)
{
    for (count run = 0; run < c->runs; run++)
        for (count j = 0; j < c->length; j += LANES) {
            vec rows[LANES];
            UNROLLED for (int i = 0; i < LANES; i++)
                rows[i] = *(const vec *)(from + run * c->step + (j + i) * LANES);
            transpose(rows);
            for (int i = 0; i < LANES; i++) {
                REAL *at = into + s->at[i] + run * c->image + j;
                if (j + LANES <= s->high[i])
                    *(loose *)at = (loose)rows[i];
                else
                    for (count k = j; k < s->high[i]; k++)
                        at[k - j] = ((REAL *)&rows[i])[k - j];
            }
        }
}

INLINE void copy_row(const REAL *restrict from, count length, REAL *restrict into)
{
    if (length < LANES)
        for (count i = 0; i < length; i++)
            into[i] = from[i];
    else {
        for (count i = 0; i + LANES < length; i += LANES)
            *(loose *)(into + i) = *(const loose *)(from + i);
        *(loose *)(into + length - LANES) = *(const loose *)(from + length - LANES);
    }
}

// The windows of a sample, row by row.
static void copy_rows_in(const REAL *restrict from, const geometry *g, const layout *l, REAL *restrict into)
{
    const window *w = l->axes;
    const count first = AT_LEAST(0, -w[2].low), end = AT_MOST(w[2].size, g->in[2] - w[2].low), stride = stride_of_row(g);
    for (count channel = 0; channel < g->groups * g->ins; channel++)
        for (count i = AT_LEAST(0, -w[0].low); i < AT_MOST(w[0].size, g->in[0] - w[0].low); i++)
            for (count j = AT_LEAST(0, -w[1].low); j < AT_MOST(w[1].size, g->in[1] - w[1].low); j++) {
                const REAL *row = from + ((channel * g->in[0] + i + w[0].low) * g->in[1] + j + w[1].low) * g->in[2] + w[2].low;
                REAL *to = into + channel * l->in_pixels * LANES + (i * w[1].size + j) * pitch(g, l);
                if (stride == 1)
                    copy_row(row + first, end - first, to + first);
                else
                    for (count k = first; k < end; k++)
                        to[k % stride * l->apart + k / stride] = row[k];
            }
}

// Outputs of a sample, between a tensor and a buffer.
static void copy_rows(const geometry *g, const layout *l, const REAL *restrict from, count from_row, REAL *restrict into,
                      count into_row)
{
    for (count row = 0; row < g->groups * g->outs * g->out[0] * g->out[1]; row++)
        copy_row(from + row * from_row, g->out[2], into + row * into_row);
}

static count *numbers(count length)
{
    return malloc(sizeof(count) * AT_LEAST(length, 1));
}

static REAL *buffer(count vectors)
{
    // A load may read some vectors beyond the last one.
    return aligned_alloc(64, ((vectors + LANES) * BYTES + 63) / 64 * 64);
}

// How the windows of inputs are copied; a pixel outside of them goes behind the buffer.
static copied copied_windows(const geometry *g, const layout *l)
{
    const window *w = l->axes;
    const count channels = g->groups * g->ins, slabs[3] = {g->in[1] * g->in[2], g->in[2], 1};
    const int whole = l->bands == 1;
    copied c = {whole ? 1 : channels, 0, g->in[0] * slabs[0], slabs[g->axis], 0, 0, whole ? 0 : l->in_pixels * LANES};
    c.total = channels * c.image;
    c.length = l->vectors ? 0 : whole ? c.total : w[g->axis].size * c.slab;
    c.places = numbers(c.length);
    if (!c.places || l->vectors)
        return c;
    count sizes[3], skipped[3];
    for (int a = 0; a < 3; a++) {
        const int is_cut = a == g->axis && !whole;
        sizes[a] = is_cut ? w[a].size : g->in[a];
        skipped[a] = is_cut ? 0 : w[a].low;
    }
    count *place = c.places;
    for (count channel = 0; channel < (whole ? channels : 1); channel++)
        for (count i = 0; i < sizes[0]; i++)
            for (count j = 0; j < sizes[1]; j++)
                for (count k = 0; k < sizes[2]; k++) {
                    const count at[3] = {i - skipped[0], j - skipped[1], k - skipped[2]};
                    int inside = 1;
                    for (int a = 0; a < 3; a++)
                        inside &= at[a] >= 0 && at[a] < w[a].size;
                    const count pixel = (at[0] * w[1].size + at[1]) * w[2].size + at[2];
                    *place++ = (channel * l->in_pixels + (inside ? pixel : l->in_pixels - 1)) * LANES;
                }
    return c;
}

// How outputs are copied, in or out; their buffers are dense.
static copied copied_outputs(const geometry *g, const layout *l)
{
    const count slabs[3] = {g->out[1] * g->out[2], g->out[2], 1}, channels = g->groups * g->outs;
    const int whole = l->bands == 1;
    copied c = {whole ? 1 : channels, 0, g->out[0] * slabs[0], slabs[g->axis], 0, 0, l->out_pixels * LANES};
    c.total = channels * c.image;
    c.length = l->vectors ? 0 : whole ? c.total : l->out_pixels;
    c.places = numbers(c.length);
    for (count j = 0; j < c.length && c.places; j++)
        c.places[j] = j * LANES;
    return c;
}

static lanes input_lanes(count chunk, const geometry *g, const layout *l, const copied *c)
{
    const window *w = &l->axes[g->axis];
    return lanes_of(chunk, l, g->batch, g->in_sample, g->groups * g->ins, c->image, c->slab, w->low, w->move, w->size,
                    g->in[g->axis]);
}

static lanes output_lanes(count chunk, const geometry *g, const layout *l, const copied *c, count sample)
{
    const count rows = l->axes[g->axis].outs;
    return lanes_of(chunk, l, g->batch, sample, g->groups * g->outs, c->image, c->slab, 0, rows, rows, g->out[g->axis]);
}

// A chunk of the inputs of a member, into a buffer; and of its results, out of one.
static void take_in(const REAL *x, count chunk, const geometry *g, const layout *l, const copied *in, REAL *images)
{
    if (l->vectors) {
        copy_rows_in(x + chunk * g->in_sample, g, l, images);
        return;
    }
    const lanes from = input_lanes(chunk, g, l, in);
    copy_in(x, &from, in, images);
}

static void give_out(const REAL *results, count chunk, const geometry *g, const layout *l, const copied *out, REAL *y)
{
    if (l->vectors) {
        copy_rows(g, l, results, l->vectors * LANES, y + chunk * out->total, g->out[2]);
        return;
    }
    const lanes to = output_lanes(chunk, g, l, out, out->total);
    copy_out(results, &to, out, y);
}

// Outputs with the same taps: all, or if a strided filter scatters, every stride-th; of rows with the same taps inside the image,
// if that saves a quarter of the products, as for the input of filters without padding.
typedef struct {
    count terms, pixels;     // of a sum over input channels and taps; of the output
    count *from, *weight;    // of each term: its place in the buffer, and its number among those of a filter
    count *origin, *target;  // of each pixel: places in the buffers
} phase;

static int is_whole(const phase *p)
{
    return p->from && p->weight && p->origin && p->target;
}

static int is_inside(const geometry *g, count q, count tap)
{
    count at;
    return under(g, g->axis, q, tap, &at) && at >= 0 && at < g->in[g->axis];
}

static int skips_edges(const geometry *g, const layout *l)
{
    count inside = 0;
    for (count q = 0; q < g->out[g->axis]; q++)
        for (count k = 0; k < g->taps[g->axis]; k++)
            inside += is_inside(g, q, k);
    const int has_phases = g->scatters && g->stride[0] * g->stride[1] * g->stride[2] > 1;
    return !l->vectors && l->bands == 1 && g->axis < 2 && !has_phases && 4 * inside < 3 * g->out[g->axis] * g->taps[g->axis];
}

// The first row behind `row` with other taps.
static count next_row(const geometry *g, count row)
{
    for (count next = row + 1; next < g->out[g->axis]; next++)
        for (count k = 0; k < g->taps[g->axis]; k++)
            if (is_inside(g, next, k) != is_inside(g, row, k))
                return next;
    return g->out[g->axis];
}

// The phase of outputs `first` and so on by the stride, or of the rows from `rows[0]` to `rows[1]`.
static phase make_phase(const geometry *g, const layout *l, const count *first, const count *rows)
{
    const window *w = l->axes;
    count outs[3], steps[3], starts[3] = {0}, taps = 0;
    phase p = {0, 1, 0, 0, 0, 0};
    for (int a = 0; a < 3; a++) {
        steps[a] = g->scatters ? g->stride[a] : 1;
        outs[a] = first[a] < w[a].outs ? (w[a].outs - first[a] + steps[a] - 1) / steps[a] : 0;
        if (rows && a == g->axis) {
            starts[a] = rows[0];
            outs[a] = rows[1] - rows[0];
        }
    }
    if (l->vectors)
        outs[2] = l->vectors;
    p.pixels = outs[0] * outs[1] * outs[2];
    const count all = g->taps[0] * g->taps[1] * g->taps[2];
    p.from = numbers(all * g->ins);
    p.weight = numbers(all * g->ins);
    p.origin = numbers(p.pixels);
    p.target = numbers(p.pixels);
    if (!is_whole(&p))
        return p;
    for (count k = 0; k < all; k++) {
        const count tap[3] = {k / g->taps[2] / g->taps[1], k / g->taps[2] % g->taps[1], k % g->taps[2]};
        count place = 0, at = 0, exists = 1;
        for (int a = 0; a < 3; a++) {
            exists &= under(g, a, first[a], tap[a], &at);
            if (a == 2 && l->vectors)
                place = place * pitch(g, l) + (at - w[a].low) % stride_of_row(g) * l->apart + (at - w[a].low) / stride_of_row(g);
            else
                place = place * w[a].size + at - w[a].low;
        }
        if (exists && (!rows || is_inside(g, rows[0], tap[g->axis]))) {
            p.from[taps] = place * (l->vectors ? 1 : LANES);
            p.weight[taps++] = k;
        }
    }
    p.terms = taps * g->ins;
    for (count i = p.terms - 1; i >= 0; i--) {
        p.from[i] = p.from[i % taps] + i / taps * l->in_pixels * LANES;
        p.weight[i] = p.weight[i % taps] + i / taps * all;
    }
    const count jump[3] = {g->scatters ? 1 : g->stride[0], g->scatters ? 1 : g->stride[1], g->scatters ? 1 : g->stride[2]};
    count q = 0;
    for (count i = 0; i < outs[0]; i++)
        for (count j = 0; j < outs[1]; j++)
            for (count k = 0; k < outs[2]; k++, q++) {
                const count at[3] = {starts[0] + i, starts[1] + j, k};
                if (l->vectors) {
                    p.origin[q] = (i * jump[0] * w[1].size + j * jump[1]) * pitch(g, l) + k * LANES;
                    p.target[q] = q * LANES;
                    continue;
                }
                p.origin[q] = ((at[0] * jump[0] * w[1].size + at[1] * jump[1]) * w[2].size + at[2] * jump[2]) * LANES;
                const count pixel = ((first[0] + at[0] * steps[0]) * w[1].outs + first[1] + at[1] * steps[1]) * w[2].outs;
                p.target[q] = (pixel + first[2] + at[2] * steps[2]) * LANES;
            }
    return p;
}

static void free_phase(phase *p)
{
    free(p->from);
    free(p->weight);
    free(p->origin);
    free(p->target);
}

// Outputs of some channels, on pixels `low` to `high` of a phase; the last ones are computed twice rather than one by one.
#define SUMS(CHANNELS, PIXELS)                                                                                                 \
    static void sums_##CHANNELS(const phase *p, count low, count high, const REAL *in, const REAL *weight, const REAL *bias,   \
                                REAL *out, count channel)                                                                      \
    {                                                                                                                          \
        for (count q = low; q < high; q += PIXELS) {                                                                           \
            const REAL *from[PIXELS];                                                                                          \
            vec sum[CHANNELS][PIXELS];                                                                                         \
            UNROLLED for (int i = 0; i < PIXELS; i++) from[i] = in + p->origin[AT_MOST(q + i, high - 1)];                      \
            UNROLLED for (int o = 0; o < CHANNELS; o++) UNROLLED for (int i = 0; i < PIXELS; i++) sum[o][i] =                  \
                (vec){0} + (bias ? bias[o] : 0);                                                                               \
            for (count t = 0; t < p->terms; t++) {                                                                             \
                vec x[PIXELS];                                                                                                 \
                UNROLLED for (int i = 0; i < PIXELS; i++) x[i] = *(const loose *)(from[i] + p->from[t]);                         \
                UNROLLED for (int o = 0; o < CHANNELS; o++)                                                                    \
                {                                                                                                              \
                    vec w = (vec){0} + weight[p->weight[t] * CHANNELS + o];                                                    \
                    KEPT(w);                                                                                                   \
                    UNROLLED for (int i = 0; i < PIXELS; i++) sum[o][i] += w * x[i];                                           \
                }                                                                                                              \
            }                                                                                                                  \
            UNROLLED for (int i = 0; i < PIXELS; i++) UNROLLED for (int o = 0; o < CHANNELS; o++) *(                           \
                loose *)(out + p->target[AT_MOST(q + i, high - 1)] + o * channel) = sum[o][i];                                 \
        }                                                                                                                      \
    }
EACH(SUMS)

// Sums over pixels of the products of some dense images and of all terms' windows, added to what was there.
#define PRODUCTS(CHANNELS, TERMS)                                                                                              \
    static void products_##CHANNELS(const phase *p, count low, count high, const REAL *in, const REAL *out, count channel,     \
                                    REAL *into)                                                                                \
    {                                                                                                                          \
        for (count t = 0; t < p->terms; t += TERMS) {                                                                          \
            const REAL *from[TERMS];                                                                                           \
            vec sum[CHANNELS][TERMS];                                                                                          \
            UNROLLED for (int i = 0; i < TERMS; i++) from[i] = in + p->from[AT_MOST(t + i, p->terms - 1)];                     \
            UNROLLED for (int o = 0; o < CHANNELS; o++) UNROLLED for (int i = 0; i < TERMS; i++) sum[o][i] =                   \
                *(vec *)(into + (o * p->terms + AT_MOST(t + i, p->terms - 1)) * LANES);                                        \
            for (count q = low; q < high; q++) {                                                                               \
                vec x[TERMS];                                                                                                  \
                UNROLLED for (int i = 0; i < TERMS; i++) x[i] = *(const loose *)(from[i] + p->origin[q]);                        \
                UNROLLED for (int o = 0; o < CHANNELS; o++)                                                                    \
                {                                                                                                              \
                    vec y = *(const loose *)(out + p->target[q] + o * channel);                                                \
                    KEPT(y);                                                                                                   \
                    UNROLLED for (int i = 0; i < TERMS; i++) sum[o][i] += y * x[i];                                            \
                }                                                                                                              \
            }                                                                                                                  \
            UNROLLED for (int o = 0; o < CHANNELS; o++) UNROLLED for (int i = 0; i < TERMS; i++) *(                            \
                vec *)(into + (o * p->terms + AT_MOST(t + i, p->terms - 1)) * LANES) = sum[o][i];                              \
        }                                                                                                                      \
    }
EACH(PRODUCTS)

typedef void sums_of(const phase *, count, count, const REAL *, const REAL *, const REAL *, REAL *, count);
typedef void products_of(const phase *, count, count, const REAL *, const REAL *, count, REAL *);
#define NAME_OF_SUMS(CHANNELS, _) sums_##CHANNELS,
#define NAME_OF_PRODUCTS(CHANNELS, _) products_##CHANNELS,
static sums_of *const sums[] = {EACH(NAME_OF_SUMS)};
static products_of *const products[] = {EACH(NAME_OF_PRODUCTS)};

// The channels of the block that begins at channel `o`: blocks are as even as possible.
INLINE count block(count channels, count o)
{
    const count blocks = (channels + MOST - 1) / MOST, each = channels / blocks, larger = channels % blocks;
    return o < larger * (each + 1) ? each + 1 : each;
}

// The filters of a model in the order in which they are read: [block of channels][term][channel of the block].
static void pack(const geometry *g, const REAL *from, REAL *into)
{
    const count taps = g->taps[0] * g->taps[1] * g->taps[2];
    for (count group = 0; group < g->groups; group++, from += g->outs * g->ins * taps)
        for (count o = 0, size; o < g->outs; o += size) {
            size = block(g->outs, o);
            for (count in = 0; in < g->ins; in++)
                for (count k = 0; k < taps; k++)
                    for (count i = 0; i < size; i++)
                        *into++ = from[(o + i) * g->weight_out + in * g->weight_in + k];
        }
}

// Out of inputs [M,N,GI,in] and filters the outputs [M,N,GO,out], which are contiguous. Returns whether memory is missing.
int convolve(const geometry *g, const REAL *x, const REAL *weight, const REAL *bias, REAL *y, count threads)
{
    const layout l = best_layout(g, 0);
    const copied in = copied_windows(g, &l), out = copied_outputs(g, &l);
    const count *s = g->stride, strides = g->scatters ? s[0] * s[1] * s[2] : 1;
    const count taps = g->taps[0] * g->taps[1] * g->taps[2], terms = g->ins * taps, filters = g->groups * g->outs * terms;
    const int skips = skips_edges(g, &l);
    phase *all = calloc(skips ? g->out[g->axis] : strides, sizeof(phase));
    int missing = !in.places || !out.places || !all;
    count phases = 0;
    for (count row = 0; !missing && (skips ? row < g->out[g->axis] : phases < strides); phases++) {
        const count rows[2] = {row, next_row(g, row)}, none[3] = {0};
        const count first[3] = {phases / s[2] / s[1], phases / s[2] % s[1], phases % s[2]};
        all[phases] = make_phase(g, &l, skips ? none : first, skips ? rows : 0);
        missing = !is_whole(&all[phases]);
        row = rows[1];
    }
#pragma omp parallel num_threads(threads) if (g->models * l.chunks > 1)
    {
        const count in_vectors = g->groups * g->ins * l.in_pixels;
        REAL *images = buffer(in_vectors), *results = buffer(g->groups * g->outs * l.out_pixels);
        REAL *packed = malloc(sizeof(REAL) * AT_LEAST(filters, 1));
        count last = -1;
        if (!images || !results || !packed) {
#pragma omp atomic write
            missing = 1;
        } else
            memset(images, 0, in_vectors * BYTES);
#pragma omp barrier
#pragma omp for schedule(static)
        for (count item = 0; item < (missing ? 0 : g->models * l.chunks); item++) {
            const count model = item / l.chunks, chunk = item % l.chunks;
            take_in(x + model * g->in_model, chunk, g, &l, &in, images);
            REAL *const into = y + model * g->batch * out.total;
            REAL *const outputs = is_tight(g, &l) ? into + chunk * out.total : results;
            if (last != model)
                pack(g, weight + model * filters, packed);
            for (const phase *p = all; p < all + phases; p++)
                for (count group = 0; group < g->groups; group++)
                    for (count q = 0; q < p->pixels; q += PIXELS_AT_ONCE)
                        for (count o = 0, size; o < g->outs; o += size) {
                            const count channel = group * g->outs + o;
                            size = block(g->outs, o);
                            sums[size - 1](p, q, AT_MOST(q + PIXELS_AT_ONCE, p->pixels),
                                           images + group * g->ins * l.in_pixels * LANES, packed + channel * terms,
                                           bias ? bias + model * g->groups * g->outs + channel : 0,
                                           outputs + channel * l.out_pixels * LANES, l.out_pixels * LANES);
                        }
            last = model;
            if (outputs == results)
                give_out(results, chunk, g, &l, &out, into);
        }
        free(images);
        free(results);
        free(packed);
    }
    for (count i = 0; i < phases && all; i++)
        free_phase(&all[i]);
    free(all);
    free(in.places);
    free(out.places);
    return missing;
}

// Sums over lanes.
static void reduce(const REAL *from, count length, REAL *into)
{
    for (count j = 0; j < length; j += LANES) {
        vec rows[LANES];
        UNROLLED for (int i = 0; i < LANES; i++)
            rows[i] = *(const vec *)(from + (j + i) * LANES);
        transpose(rows);
        for (int half = LANES / 2; half; half /= 2)
            for (int i = 0; i < half; i++)
                rows[i] += rows[i + half];
        memcpy(into + j, rows, sizeof(REAL) * AT_MOST(LANES, length - j));
    }
}

// Sums over pixels of dense images, added to what was there.
static void add_up(const REAL *images, count channels, count pixels, REAL *into)
{
    for (count channel = 0; channel < channels; channel++, images += pixels * LANES) {
        vec sum[8] = {{0}};
        for (count q = 0; q < pixels; q += 8)
            UNROLLED for (int i = 0; i < 8; i++)
                if (q + i < pixels)
                    sum[i] += *(const loose *)(images + (q + i) * LANES);
        vec *all = (vec *)(into + channel * LANES);
        UNROLLED for (int i = 0; i < 8; i++)
            *all += sum[i];
    }
}

// Batches are summed in at most so many parts, whatever the number of threads.
#define PARTS 8

// Out of big images, as inputs, and small ones [M,N,GO,out] the gradients of the filters, and of a bias of the small ones.
// Returns whether memory is missing.
int correlate(const geometry *g, const REAL *big, const REAL *small, count small_model, count small_sample, REAL *gradient,
              REAL *of_bias, count threads)
{
    const layout l = best_layout(g, 1);
    const copied in = copied_windows(g, &l), out = copied_outputs(g, &l);
    const count parts = AT_LEAST(1, AT_MOST(PARTS, l.chunks / 2)), biases = g->groups * g->outs;
    const count group_of_filters = g->outs * g->ins * g->taps[0] * g->taps[1] * g->taps[2], filters = g->groups * group_of_filters;
    phase p = make_phase(g, &l, (count[]){0, 0, 0}, 0);
    REAL *sums_of_parts = malloc(sizeof(REAL) * AT_LEAST(g->models * parts * (filters + biases), 1));
    int missing = !in.places || !out.places || !is_whole(&p) || !sums_of_parts;
#pragma omp parallel num_threads(threads) if (g->models * parts > 1)
    {
        const count in_vectors = g->groups * g->ins * l.in_pixels;
        REAL *images = buffer(in_vectors), *dense = buffer(biases * l.out_pixels), *into = buffer(filters + biases);
        if (!images || !dense || !into) {
#pragma omp atomic write
            missing = 1;
        } else
            memset(images, 0, in_vectors * BYTES);
        if (dense)
            memset(dense, 0, biases * l.out_pixels * BYTES);
#pragma omp barrier
#pragma omp for schedule(static)
        for (count item = 0; item < (missing ? 0 : g->models * parts); item++) {
            const count model = item / parts, part = item % parts;
            memset(into, 0, (filters + biases) * BYTES);
            for (count chunk = l.chunks * part / parts; chunk < l.chunks * (part + 1) / parts; chunk++) {
                const REAL *const of_small = small + model * small_model, *const sample = of_small + chunk * small_sample;
                const REAL *const given = is_tight(g, &l) ? sample : dense;
                take_in(big + model * g->in_model, chunk, g, &l, &in, images);
                if (!l.vectors) {
                    const lanes at = output_lanes(chunk, g, &l, &out, small_sample);
                    copy_in(of_small, &at, &out, dense);
                } else if (given == dense)
                    copy_rows(g, &l, sample, g->out[2], dense, l.vectors * LANES);
                add_up(given, biases, l.out_pixels, into + filters * LANES);
                for (count group = 0; group < g->groups; group++)
                    for (count q = 0; q < p.pixels; q += PIXELS_AT_ONCE)
                        for (count o = 0, size; o < g->outs; o += size) {
                            size = block(g->outs, o);
                            products[size - 1](&p, q, AT_MOST(q + PIXELS_AT_ONCE, p.pixels),
                                               images + group * g->ins * l.in_pixels * LANES,
                                               given + (group * g->outs + o) * l.out_pixels * LANES, l.out_pixels * LANES,
                                               into + (group * group_of_filters + o * p.terms) * LANES);
                        }
            }
            reduce(into, filters + biases, sums_of_parts + item * (filters + biases));
        }
        free(images);
        free(dense);
        free(into);
    }
    for (count model = 0; model < g->models && !missing; model++)
        for (count i = 0; i < filters + biases; i++) {
            REAL sum = 0;
            for (count part = 0; part < parts; part++)
                sum += sums_of_parts[(model * parts + part) * (filters + biases) + i];
            *(i < filters ? gradient + model * filters + i : of_bias + model * biases + i - filters) = sum;
        }
    free(sums_of_parts);
    free_phase(&p);
    free(in.places);
    free(out.places);
    return missing;
}
