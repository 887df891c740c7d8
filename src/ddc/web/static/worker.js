// Restores a picture tile by tile, beside the page, so that the page stays responsive.
// Messages in: {load: "auto" | "wasm" | "webgpu"} and {restore: job}. Messages out: {engine}, {fraction, text}, {done}, {error}.

import { singularVectors } from "./blur.js";

const MARGIN = 8; // pixels at the border of a tile that padding inside the network affects
const RAMP = 32; // pixels over which one tile is blended into the next
const ROUNDING = 1.5 / (255 * Math.sqrt(12)); // the noise that 8 bits are, for a network
const BLURS = ["blur", "gauss"];
const FOLDER = new URL("./", self.location.href).href;

let ort, model, weights, session, sessionName, border, bases = {};
let engine = {};

self.onmessage = async ({ data }) => {
  try {
    if (data.load) await load(data.load);
    if (data.restore) await restore(data.restore);
  } catch (error) {
    self.postMessage({ error: messageOf(error) });
  }
};

function messageOf(error) {
  const text = String(error?.message ?? error);
  if (/memory|allocat|bad_alloc/i.test(text)) return "There is not enough memory for this. Close other tabs, or choose a smaller picture.";
  return /[.!]$/.test(text) ? text : `${text}.`;
}

const tell = (fraction, text) => self.postMessage({ fraction, text });

async function fetched(path) {
  const response = await fetch(FOLDER + path);
  if (!response.ok) throw new Error(`${path} could not be loaded (${response.status}). Load the page again`);
  return response;
}

async function load(wish) {
  const adapter = wish !== "wasm" && self.navigator.gpu ? await self.navigator.gpu.requestAdapter().catch(() => null) : null;
  const webgpu = Boolean(adapter) && (wish === "webgpu" || !adapter.info?.isFallbackAdapter);
  const threads = self.crossOriginIsolated ? Math.min(self.navigator.hardwareConcurrency || 1, 8) : 1;
  engine = { webgpu, threads };
  model = await (await fetched("model/model.json")).json();
  weights = await unpacked(`model/${model.weights}`, "Loading the network");
  ort = await import(`${FOLDER}ort/ort.${webgpu ? "webgpu" : "wasm"}.min.mjs`);
  const binary = await unpacked(`ort/ort-wasm-simd-threaded${webgpu ? ".asyncify" : ""}.wasm`, "Loading the engine");
  Object.assign(ort.env.wasm, { wasmBinary: binary.buffer, wasmPaths: `${FOLDER}ort/`, numThreads: threads });
  ort.env.logLevel = "error";
  self.postMessage({ engine: { ...engine, kernel: model.kernel } });
}

// The content of a large file, which is stored packed.
async function unpacked(path, text) {
  const response = await fetched(`${path}.packed`), total = Number(response.headers.get("Content-Length"));
  let size = 0;
  const counted = new TransformStream({
    transform(part, out) {
      size += part.length;
      tell(total ? Math.min(size / total, 1) : 0, `${text}: ${Math.round(size / 1e6)} MB`);
      out.enqueue(part);
    },
  });
  const stream = response.body.pipeThrough(counted).pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function open(name) {
  if (sessionName !== name) {
    await session?.release();
    session = sessionName = undefined;
    session = await created(name);
    sessionName = name;
  }
  if (BLURS.includes(name)) border ??= await created("border");
}

async function created(name) {
  const create = async (provider) => ort.InferenceSession.create(
    new Uint8Array(await (await fetched(`model/${name}${provider === "wasm" && name !== "border" ? ".wasm" : ""}.onnx`)).arrayBuffer()), {
      executionProviders: [provider],
      externalData: [{ path: model.weights, data: weights }],
      extra: { session: { disable_quant_qdq: "1" } }, // weights become float32 once, and not in each run
    });
  try {
    return await create(engine.webgpu ? "webgpu" : "wasm");
  } catch (error) {
    if (!engine.webgpu) throw error;
    engine.webgpu = false; // a device that cannot hold the network
    return create("wasm");
  }
}

// ---------------------------------------------------------------------------------------------------------
// tiles, as in ddc/tiling.py; the picture is padded, so that all tiles have the size of the graph

// The starts of the tiles along one side, and their weights, which sum to 1.
export function tilesAlong(length, tile, margin, grid) {
  if (length <= tile) return [{ start: 0, weight: new Float32Array(tile).fill(1) }];
  margin = Math.min(margin, tile >> 2);
  const overlap = Math.min(2 * margin + RAMP, tile >> 1);
  const stride = Math.max(Math.floor((tile - overlap) / grid), 1) * grid;
  const last = length - tile, total = new Float32Array(length), tiles = [];
  for (let start = 0; ; start = Math.min(start + stride, last)) {
    const weight = Float32Array.from({ length: tile }, (_, i) => {
      const inside = Math.min(start > 0 ? i + 0.5 : Infinity, start < last ? tile - i - 0.5 : Infinity);
      const ramp = Math.min(Math.max((inside - margin) / Math.max(overlap - 2 * margin, 1), 0), 1);
      return Math.sin((ramp * Math.PI) / 2) ** 2;
    });
    weight.forEach((value, i) => (total[start + i] += value));
    tiles.push({ start, weight });
    if (start === last) break;
  }
  for (const { start, weight } of tiles) weight.forEach((value, i) => (weight[i] = value / total[start + i]));
  return tiles;
}

// Where a place beyond the picture is read: mirrored, or the border itself.
function placed(index, length, mirrored) {
  if (!mirrored) return Math.min(index, length - 1);
  const folded = index % (2 * length);
  return Math.min(folded, 2 * length - 1 - folded);
}

async function restore(job) {
  const { graph: name, pixels, width, height } = job;
  tell(0, "Preparing …");
  await open(name);
  const { scale, side } = model.graphs[name];
  const grid = name === "jpeg" ? 16 : scale, margin = Math.max(MARGIN, 2 * (job.reach ?? 0));
  const padded = (length) => Math.max(side, Math.ceil((length * scale) / grid) * grid);
  const rows = tilesAlong(padded(height), side, margin, grid), columns = tilesAlong(padded(width), side, margin, grid);
  const size = { width: width * scale, height: height * scale };
  const sum = new Float32Array(3 * size.width * size.height);
  const started = performance.now(), total = rows.length * columns.length;
  let finished = 0;
  for (const row of rows) {
    for (const column of columns) {
      const inputs = inputsOf(job, name, row.start / scale, column.start / scale, side / scale, total > 1);
      if (BLURS.includes(name)) inputs.y = await run(border, inputs);
      const picture = await run(session, inputs);
      blend(sum, size, await picture.getData(), side, row, column);
      for (const tensor of [...Object.values(inputs), picture]) tensor.dispose();
      finished++;
      const seconds = (performance.now() - started) / 1000;
      const left = Math.ceil((seconds / finished) * (total - finished));
      tell(finished / total, total > 1 ? `Tile ${finished} of ${total}, about ${left} s left` : "");
    }
  }
  const out = toBytes(sum, size, job, scale);
  const seconds = (performance.now() - started) / 1000;
  self.postMessage({ done: { ...size, pixels: out, seconds, tiles: finished, webgpu: engine.webgpu } }, [out.buffer]);
}

// The picture that a graph makes, which takes some of these inputs.
async function run(session, inputs) {
  return (await session.run(Object.fromEntries(session.inputNames.map((name) => [name, inputs[name]])))).picture;
}

// The inputs of the graphs for the window of y that starts at this row and column.
function inputsOf(job, name, top, left, side, tiled) {
  const { pixels, width, height, holes } = job, area = side * side;
  const y = new Float32Array(3 * area), mask = new Float32Array(area).fill(1);
  for (let i = 0; i < side; i++) {
    const row = placed(top + i, height, name !== "jpeg");
    for (let j = 0; j < side; j++) {
      const at = row * width + placed(left + j, width, name !== "jpeg"), to = i * side + j;
      for (let channel = 0; channel < 3; channel++) y[channel * area + to] = pixels[4 * at + channel] / 255;
      if (name === "holes") mask[to] = holes[at] ? 0 : 1;
    }
  }
  const tensor = (data, ...shape) => new ort.Tensor("float32", Float32Array.from(data), shape);
  const inside = (start, length) => tensor(y.subarray(0, side).map((_, i) => (start + i < length ? 1 : 0)), side);
  const told = job.sigma * (job.grey ? Math.sqrt(3) : 1); // the noise of a grey picture is the same in all channels
  const all = {
    y: tensor(y, 1, 3, side, side),
    sigma: tensor([name === "jpeg" ? job.sigma : Math.max(told, ROUNDING)], 1),
    conditions: tensor(job.conditions, 1, job.conditions.length),
    tiled: tensor([tiled ? 1 : 0], 1),
    ...(name === "holes" && { mask: tensor(mask, 1, 1, side, side) }),
    ...(BLURS.includes(name) && { kernel: tensor(job.kernel, model.kernel, model.kernel), rows: inside(top, height), columns: inside(left, width) }),
    ...(name === "jpeg" && { luma: tensor(job.tables.luma, 8, 8), chroma: tensor(job.tables.chroma, 8, 8) }),
  };
  if (name === "gauss") {
    if (bases.amount !== job.amount) bases = { amount: job.amount, ...singularVectors(job.amount, side) };
    Object.assign(all, { u: tensor(bases.u, side, side), s: tensor(bases.s, side), v: tensor(bases.v, side, side) });
  }
  return all;
}

function blend(sum, { width, height }, picture, side, row, column) {
  for (let channel = 0; channel < 3; channel++) {
    for (let i = 0; i < side && row.start + i < height; i++) {
      const to = (channel * height + row.start + i) * width + column.start, from = (channel * side + i) * side;
      const end = Math.min(side, width - column.start);
      for (let j = 0; j < end; j++) sum[to + j] += row.weight[i] * column.weight[j] * picture[from + j];
    }
  }
}

// 8-bit pixels, with the opacity of the original unless its holes were filled.
function toBytes(sum, { width, height }, job, scale) {
  const area = width * height, out = new Uint8ClampedArray(4 * area);
  for (let i = 0; i < height; i++) {
    for (let j = 0; j < width; j++) {
      const at = i * width + j, source = Math.floor(i / scale) * job.width + Math.floor(j / scale);
      for (let channel = 0; channel < 3; channel++) out[4 * at + channel] = 255 * sum[channel * area + at];
      out[4 * at + 3] = job.holes ? 255 : job.pixels[4 * source + 3];
    }
  }
  return out;
}
