// One direction of a recurrent layer of M members, through all steps, forward and backward.
//
// Every product is `product`: rows of any strides times a matrix that is packed into panels. A member's samples are taken in a
// number of parts that depends on shapes alone, and the gradients of weights are summed in their order, so that results are the
// same on any number of threads.
//
// What is kept of a sample at a step: of an LSTM the gates i, f, g, o after their activations and the cell; of a GRU r, z, n and
// the state's part of n; of others the state. The gradients of a step are those of the gates, and of a GRU's parts of n.

// Rows of two vectors that the registers can add up at a time.
#if REGISTERS == 32
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)
#define MOST 8
#else
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#define MOST 6
#endif
#define PANEL (2 * LANES)

INLINE REAL sigmoid(REAL x) { return 1 / (2 + exp_less_one(-x)); }

INLINE REAL hyperbolic(REAL x)
{
    const REAL e = exp_less_one(-2 * (x < 0 ? -x : x)), y = -e / (2 + e);
    return x < 0 ? -y : y;
}

// into[i] += the sum over k of a[i * row + k * next] * b[k], for one or two vectors of columns.
#define TILE(ROWS)                                                                                                             \
    INLINE void tile_of_##ROWS(const int vectors, count depth, const REAL *a, count row, count next, const REAL *b, REAL *into, \
                               count wide)                                                                                     \
    {                                                                                                                          \
        vec sum[ROWS][2];                                                                                                      \
        UNROLLED for (int i = 0; i < ROWS; i++) UNROLLED for (int v = 0; v < vectors; v++) sum[i][v] =                         \
            *(const loose *)(into + i * wide + v * LANES);                                                                       \
        for (count k = 0; k < depth; k++, a += next, b += vectors * LANES) {                                                   \
            vec y[2];                                                                                                          \
            UNROLLED for (int v = 0; v < vectors; v++) y[v] = *(const loose *)(b + v * LANES);                                   \
            UNROLLED for (int i = 0; i < ROWS; i++)                                                                            \
            {                                                                                                                  \
                vec x = (vec){0} + a[i * row];                                                                                 \
                KEPT(x);                                                                                                       \
                UNROLLED for (int v = 0; v < vectors; v++) sum[i][v] += x * y[v];                                              \
            }                                                                                                                  \
        }                                                                                                                      \
        UNROLLED for (int i = 0; i < ROWS; i++) UNROLLED for (int v = 0; v < vectors; v++) *(                                  \
            loose *)(into + i * wide + v * LANES) = sum[i][v];                                                                   \
    }                                                                                                                          \
    static void narrow_##ROWS(count depth, const REAL *a, count row, count next, const REAL *b, REAL *into, count wide)        \
    {                                                                                                                          \
        tile_of_##ROWS(1, depth, a, row, next, b, into, wide);                                                                 \
    }                                                                                                                          \
    static void wide_##ROWS(count depth, const REAL *a, count row, count next, const REAL *b, REAL *into, count wide)          \
    {                                                                                                                          \
        tile_of_##ROWS(2, depth, a, row, next, b, into, wide);                                                                 \
    }
EACH(TILE)

typedef void tile(count, const REAL *, count, count, const REAL *, REAL *, count);
#define NAMES(ROWS) {narrow_##ROWS, wide_##ROWS},
static tile *const tiles[][2] = {EACH(NAMES)};

// Columns of the panel that begins at column `at`, as they are packed.
INLINE count width(count columns, count at) { return columns - at > LANES ? PANEL : LANES; }

// [rows,columns] += a @ b, whose panels have `depth` rows.
static void product(count rows, count columns, count depth, const REAL *a, count row, count next, const REAL *b, REAL *into,
                    count wide)
{
    const count blocks = (rows + MOST - 1) / MOST;
    for (count at = 0, size; at < columns; at += size) {
        size = width(columns, at);
        const count used = AT_MOST(size, columns - at);
        for (count block = 0; block < blocks; block++) {
            const count low = rows * block / blocks, high = rows * (block + 1) / blocks;
            tile *const run = tiles[high - low - 1][size / PANEL];
            REAL *const to = into + low * wide + at;
            if (used == size)
                run(depth, a + low * row, row, next, b, to, wide);
            else {
                REAL edge[MOST * PANEL];
                for (count i = 0; i < high - low; i++)
                    for (count j = 0; j < size; j++)
                        edge[i * size + j] = j < used ? to[i * wide + j] : 0;
                run(depth, a + low * row, row, next, b, edge, size);
                for (count i = 0; i < high - low; i++)
                    memcpy(to + i * wide, edge + i * size, sizeof(REAL) * used);
            }
        }
        b += depth * size;
    }
}

// Rows `first` to `first + rows` of panels that have `depth` rows.
static void pack(const REAL *from, count row, count rows, count columns, REAL *into, count first, count depth)
{
    for (count at = 0, size; at < columns; at += size) {
        size = width(columns, at);
        const count used = AT_MOST(size, columns - at);
        for (count k = 0; k < rows; k++) {
            REAL *const to = into + at * depth + (first + k) * size;
            if (used == PANEL)
                memcpy(to, from + k * row + at, sizeof(REAL) * PANEL);
            else
                for (count j = 0; j < size; j++)
                    to[j] = j < used ? from[k * row + at + j] : 0;
        }
    }
}

// The panels of a transposed matrix [columns,depth].
static void pack_transposed(const REAL *from, count columns, count depth, REAL *into)
{
    for (count at = 0, size; at < columns; at += size) {
        size = width(columns, at);
        for (count v = 0; v < size; v += LANES) {
            const REAL *const block = from + (at + v) * depth;
            count first = 0;
            for (; at + v + LANES <= columns && first + LANES <= depth; first += LANES) {
                vec rows[LANES];
                UNROLLED for (int j = 0; j < LANES; j++)
                    rows[j] = *(const loose *)(block + j * depth + first);
                transpose(rows);
                UNROLLED for (int k = 0; k < LANES; k++)
                    *(loose *)(into + (first + k) * size + v) = rows[k];
            }
            for (count j = 0; j < LANES; j++)
                for (count k = first; k < depth; k++)
                    into[k * size + v + j] = at + v + j < columns ? block[j * depth + k] : 0;
        }
        into += size * depth;
    }
}

enum { LSTM, GRU, TANH, RELU };

// One direction of one layer; strides of inputs, in numbers, by member, step and sample.
typedef struct {
    count kind, models, steps, batch, ins, size, reverse, of_x[3], of_grad[3], of_dx[3];
} layer;

#define GATES(l) ((l)->kind == LSTM ? 4 : (l)->kind == GRU ? 3 : 1)
// What is kept of a sample at a step, in states, and how many gradients it has.
#define KEEPS(l) ((l)->kind == LSTM ? 5 : (l)->kind == GRU ? 4 : 1)
#define SLOPES(l) ((l)->kind < TANH ? 4 : 1)
// Columns as panels hold them.
#define PADDED(n) (((n) + PANEL - 1) / PANEL * PANEL)

INLINE count num_parts(const layer *l) { return l->steps < 4 ? 1 : AT_LEAST(1, AT_MOST(4, l->batch / 16)); }
INLINE count time_of(const layer *l, count step) { return l->reverse ? l->steps - 1 - step : step; }

static REAL *memory(count numbers) { return aligned_alloc(64, (numbers * SIZE + 127) / 64 * 64); }

static void activate(const layer *l, REAL *restrict kept, const REAL *restrict cell, const REAL *restrict state,
                     REAL *restrict next)
{
    const count H = l->size;
    if (l->kind == LSTM)
        for (count j = 0; j < H; j++) {
            const REAL i = sigmoid(kept[j]), f = sigmoid(kept[H + j]), g = hyperbolic(kept[2 * H + j]);
            const REAL o = sigmoid(kept[3 * H + j]), c = f * cell[j] + i * g;
            kept[j] = i;
            kept[H + j] = f;
            kept[2 * H + j] = g;
            kept[3 * H + j] = o;
            kept[4 * H + j] = c;
            next[j] = o * hyperbolic(c);
        }
    else if (l->kind == GRU)
        for (count j = 0; j < H; j++) {
            const REAL r = sigmoid(kept[j]), z = sigmoid(kept[H + j]);
            const REAL n = hyperbolic(kept[2 * H + j] + r * kept[3 * H + j]);
            kept[j] = r;
            kept[H + j] = z;
            kept[2 * H + j] = n;
            next[j] = n + z * (state[j] - n);
        }
    else if (l->kind == TANH)
        for (count j = 0; j < H; j++)
            next[j] = kept[j] = hyperbolic(kept[j]);
    else
        for (count j = 0; j < H; j++)
            next[j] = kept[j] = kept[j] < 0 ? 0 : kept[j];
}

// Some samples of a member, and whether the thread comes to this member only now.
typedef struct {
    count model, item, low, rows, begin, is_new;
} part;

// `run` for every part of every member, each thread with buffers of its own. Returns whether memory is missing.
typedef void work(const layer *, REAL *const *, const part *, REAL *buffers, REAL *sums);
static int run_parts(work *run, const layer *l, REAL *const *p, count numbers, REAL *sums, count threads)
{
    const count parts = num_parts(l);
    int missing = 0;
#pragma omp parallel num_threads(threads) if (l->models * parts > 1)
    {
        REAL *const buffers = memory(numbers);
        if (!buffers) {
#pragma omp atomic write
            missing = 1;
        }
#pragma omp barrier
        count last = -1;
#pragma omp for schedule(static)
        for (count item = 0; item < (missing ? 0 : l->models * parts); item++) {
            const count m = item / parts, low = l->batch * (item % parts) / parts, high = l->batch * (item % parts + 1) / parts;
            run(l, p, &(part){m, item, low, high - low, (m * l->batch + low) * l->size, m != last}, buffers, sums);
            last = m;
        }
        free(buffers);
    }
    return missing;
}

INLINE count row_of(const layer *l, const part *s, count t) { return (s->model * l->steps + t) * l->batch + s->low; }

// The state's part of a GRU's n is apart from its other gates.
INLINE count joint_gates(const layer *l) { return (l->kind == GRU ? 2 : GATES(l)) * l->size; }

static void forward_part(const layer *l, REAL *const *p, const part *s, REAL *buffers, REAL *unused)
{
    const count H = l->size, G = GATES(l) * H, K = KEEPS(l) * H, joint = joint_gates(l), m = s->model, rows = s->rows;
    REAL *const from_x = buffers, *const from_h = from_x + PADDED(G) * l->ins, *const apart = from_h + PADDED(joint) * H;
    REAL *const bias = apart + PADDED(H) * H;
    if (s->is_new) {
        const REAL *const weight = p[2] + m * G * H;
        pack_transposed(p[1] + m * G * l->ins, G, l->ins, from_x);
        pack_transposed(weight, joint, H, from_h);
        if (l->kind == GRU)
            pack_transposed(weight + joint * H, H, H, apart);
        memset(bias, 0, sizeof(REAL) * (K + H));
        for (count j = 0; p[3] && j < G; j++) {
            bias[j] = p[3][m * G + j] + (j < joint ? p[4][m * G + j] : 0);
            if (j >= joint)
                bias[H + j] = p[4][m * G + j];
        }
    }
    const REAL *state = p[5] + s->begin, *cell = p[6] ? p[6] + s->begin : 0;
    count of_cell = H;
    for (count step = 0; step < l->steps; step++) {
        const count t = time_of(l, step), row = row_of(l, s, t), filled = l->kind == GRU ? K : G;
        REAL *const kept = p[10] + row * K, *const next = p[7] + row * H;
        for (count n = 0; n < rows; n++)
            memcpy(kept + n * K, bias, sizeof(REAL) * filled);
        const REAL *const x = p[0] + m * l->of_x[0] + t * l->of_x[1] + s->low * l->of_x[2];
        product(rows, G, l->ins, x, l->of_x[2], 1, from_x, kept, K);
        product(rows, joint, H, state, H, 1, from_h, kept, K);
        if (l->kind == GRU)
            product(rows, H, H, state, H, 1, apart, kept + G, K);
        for (count n = 0; n < rows; n++)
            activate(l, kept + n * K, cell + (cell ? n * of_cell : 0), state + n * H, next + n * H);
        state = next;
        cell = kept + 4 * H;
        of_cell = K;
    }
    memcpy(p[8] + s->begin, state, sizeof(REAL) * rows * H);
    for (count n = 0; l->kind == LSTM && n < rows; n++)
        memcpy(p[9] + s->begin + n * H, cell + n * K, sizeof(REAL) * H);
}

// Pointers: inputs, both weights, both biases or none, state, cell or none; results: states, last state, last cell, what is kept.
int forward(const layer *l, REAL *const *p, count threads)
{
    const count H = l->size, of_h = PADDED(joint_gates(l)) + PADDED(H);
    return run_parts(forward_part, l, p, PADDED(GATES(l) * H) * l->ins + of_h * H + (KEEPS(l) + 1) * H, 0, threads);
}

// The gradients `slope` of what a step is made of, out of those of the state and the cell after it, which become those that a
// step before has apart from the product with the weights.
static void differentiate(const layer *l, const REAL *restrict kept, const REAL *restrict before, REAL *restrict of_state,
                          REAL *restrict of_cell, REAL *restrict slope)
{
    const count H = l->size;
    if (l->kind == LSTM)
        for (count j = 0; j < H; j++) {
            const REAL i = kept[j], f = kept[H + j], g = kept[2 * H + j], o = kept[3 * H + j], y = hyperbolic(kept[4 * H + j]);
            const REAL dh = of_state[j], dc = of_cell[j] + dh * o * (1 - y * y);
            slope[j] = dc * g * i * (1 - i);
            slope[H + j] = dc * before[j] * f * (1 - f);
            slope[2 * H + j] = dc * i * (1 - g * g);
            slope[3 * H + j] = dh * y * o * (1 - o);
            of_cell[j] = dc * f;
            of_state[j] = 0;
        }
    else if (l->kind == GRU)
        for (count j = 0; j < H; j++) {
            const REAL r = kept[j], z = kept[H + j], n = kept[2 * H + j], dh = of_state[j], dn = dh * (1 - z) * (1 - n * n);
            slope[j] = dn * kept[3 * H + j] * r * (1 - r);
            slope[H + j] = dh * (before[j] - n) * z * (1 - z);
            slope[2 * H + j] = dn;
            slope[3 * H + j] = dn * r;
            of_state[j] = dh * z;
        }
    else
        for (count j = 0; j < H; j++) {
            slope[j] = of_state[j] * (l->kind == TANH ? 1 - kept[j] * kept[j] : kept[j] > 0);
            of_state[j] = 0;
        }
}

// About as many rows of gradients at once as the cache has room for.
#define ROWS_AT_ONCE 128

INLINE count most_rows(const layer *l) { return (l->batch + num_parts(l) - 1) / num_parts(l); }
INLINE count steps_at_once(const layer *l) { return AT_LEAST(1, ROWS_AT_ONCE / AT_LEAST(most_rows(l), 1)); }
// The gradients of weights and biases of a part.
INLINE count num_sums(const layer *l) { return GATES(l) * l->size * (l->ins + l->size + 2); }

static void backward_part(const layer *l, REAL *const *p, const part *s, REAL *buffers, REAL *sums)
{
    const count H = l->size, I = l->ins, G = GATES(l) * H, K = KEEPS(l) * H, S = SLOPES(l) * H, sizes[4] = {G * I, G * H, G, G};
    const count m = s->model, rows = s->rows, joint = joint_gates(l), span = steps_at_once(l), most = span * most_rows(l);
    REAL *const to_x = buffers, *const to_h = to_x + PADDED(I) * G, *const apart = to_h + PADDED(H) * joint;
    REAL *const packed = to_h + PADDED(H) * G, *const slopes = packed + most * PADDED(AT_LEAST(I, H));
    REAL *const dc = slopes + most * S, *const dh = p[15] + s->begin;
    REAL *sum[4], *next = sums + s->item * num_sums(l);
    for (int i = 0; i < 4; next += sizes[i++]) {
        sum[i] = num_parts(l) == 1 && p[11 + i] ? p[11 + i] + m * sizes[i] : next;
        memset(sum[i], 0, sizeof(REAL) * sizes[i]);
    }
    REAL *const dwx = sum[0], *const dwh = sum[1], *const dbx = sum[2], *const dbh = sum[3];
    if (s->is_new) {
        if (p[10])
            pack(p[1] + m * G * I, I, G, I, to_x, 0, G);
        pack(p[2] + m * G * H, H, joint, H, to_h, 0, joint);
        if (l->kind == GRU)
            pack(p[2] + (m * G + joint) * H, H, H, H, apart, 0, H);
    }
    for (count i = 0; i < rows * H; i++) {
        dh[i] = p[8] ? p[8][s->begin + i] : 0;
        dc[i] = p[9] ? p[9][s->begin + i] : 0;
    }
    for (count high = l->steps, first; high > 0; high = first) {
        first = AT_LEAST(0, high - span);
        const count depth = (high - first) * rows;
        for (count step = high - 1; step >= first; step--) {
            const count t = time_of(l, step), row = row_of(l, s, t);
            const count before = step ? row + (l->reverse ? l->batch : -l->batch) : 0;
            REAL *const slope = slopes + (step - first) * rows * S;
            for (count n = 0; n < rows; n++) {
                const REAL *old = 0;
                if (l->kind == LSTM)
                    old = step ? p[6] + (before + n) * K + 4 * H : p[4] + s->begin + n * H;
                else
                    old = step ? p[5] + (before + n) * H : p[3] + s->begin + n * H;
                const REAL *const grad =
                    p[7] ? p[7] + m * l->of_grad[0] + t * l->of_grad[1] + (s->low + n) * l->of_grad[2] : 0;
                for (count j = 0; grad && j < H; j++)
                    dh[n * H + j] += grad[j];
                differentiate(l, p[6] + (row + n) * K, old, dh + n * H, dc + n * H, slope + n * S);
            }
            product(rows, H, joint, slope, S, 1, to_h, dh, H);
            if (l->kind == GRU)
                product(rows, H, H, slope + G, S, 1, apart, dh, H);
            if (p[10]) {
                REAL *const dx = p[10] + m * l->of_dx[0] + t * l->of_dx[1] + s->low * l->of_dx[2];
                for (count n = 0; n < rows; n++)
                    memset(dx + n * l->of_dx[2], 0, sizeof(REAL) * I);
                product(rows, I, G, slope, S, 1, to_x, dx, l->of_dx[2]);
            }
            const REAL *const x = p[0] + m * l->of_x[0] + t * l->of_x[1] + s->low * l->of_x[2];
            pack(x, l->of_x[2], rows, I, packed, (step - first) * rows, depth);
        }
        product(G, I, depth, slopes, 1, S, packed, dwx, I);
        for (count step = first; step < high; step++) {
            const REAL *const state = step ? p[5] + row_of(l, s, time_of(l, step - 1)) * H : p[3] + s->begin;
            pack(state, H, rows, H, packed, (step - first) * rows, depth);
        }
        product(joint, H, depth, slopes, 1, S, packed, dwh, H);
        if (l->kind == GRU)
            product(H, H, depth, slopes + G, 1, S, packed, dwh + joint * H, H);
        for (count k = 0; k < depth; k++)
            for (count j = 0; j < G; j++) {
                dbx[j] += slopes[k * S + j];
                dbh[j] += slopes[k * S + (j < joint ? j : H + j)];
            }
    }
    if (p[16])
        memcpy(p[16] + s->begin, dc, sizeof(REAL) * rows * H);
}

// Pointers: inputs, both weights, state, cell or none, states, what is kept; gradients of states, of the last state and of the
// last cell, each or none; results: gradients of inputs or none, of weights, biases, state, cell.
int backward(const layer *l, REAL *const *p, count threads)
{
    const count H = l->size, I = l->ins, G = GATES(l) * H, parts = num_parts(l), total = num_sums(l);
    const count rows = steps_at_once(l) * most_rows(l), sizes[4] = {G * I, G * H, G, G};
    const count of_rows = PADDED(AT_LEAST(I, H)) + SLOPES(l) * H;
    REAL *const sums = memory(l->models * parts * total);
    if (!sums || run_parts(backward_part, l, p, (PADDED(I) + PADDED(H)) * G + rows * (of_rows + H), sums, threads)) {
        free(sums);
        return 1;
    }
    for (count m = 0; m < l->models && parts > 1; m++)
        for (count part = 0; part < parts; part++) {
            const REAL *from = sums + (m * parts + part) * total;
            for (int i = 0; i < 4; from += sizes[i++])
                for (count j = 0; p[11 + i] && j < sizes[i]; j++)
                    p[11 + i][m * sizes[i] + j] = from[j] + (part ? p[11 + i][m * sizes[i] + j] : 0);
        }
    free(sums);
    return 0;
}
