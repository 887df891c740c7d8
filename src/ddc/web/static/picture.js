// Picture files: what a browser does not tell about them, what is wrong with them, and how they are saved.
// Pixels are decoded as they are stored: not turned upright, and without a conversion of colours.

export class PictureError extends Error {}

export const MOST_PIXELS = 24e6;

const ZIGZAG = [0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14,
  21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55,
  62, 63];
// ITU-T T.81, Annex K
const LUMA = [16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51,
  87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95,
  98, 112, 100, 103, 99];
const CHROMA = [17, 18, 24, 47, 18, 21, 26, 66, 24, 26, 56, 99, 47, 66, 99, 99];

// The quantisation tables of a quality, by the rule of the Independent JPEG Group.
export function standardTables(quality) {
  const scale = quality < 50 ? Math.floor(5000 / quality) : 200 - 2 * quality;
  const step = (base) => Math.min(255, Math.max(1, Math.floor((base * scale + 50) / 100)));
  const chroma = Array.from({ length: 64 }, (_, i) => (i % 8 < 4 && i < 32 ? CHROMA[(i >> 3) * 4 + (i % 8)] : 99));
  return { luma: LUMA.map(step), chroma: chroma.map(step) };
}

function qualityOf(table) {
  let best = [Infinity, 100];
  for (let quality = 1; quality <= 100; quality++) {
    const standard = standardTables(quality).luma;
    const distance = standard.reduce((sum, step, i) => sum + Math.abs(step - table[i]), 0);
    if (distance < best[0]) best = [distance, quality];
  }
  return best[1];
}

// ---------------------------------------------------------------------------------------------------------
// formats

const text = (bytes, start, length) => String.fromCharCode(...bytes.subarray(start, start + length));

function orientationOf(exif) {
  try {
    const view = new DataView(exif.buffer, exif.byteOffset, exif.byteLength);
    const little = view.getUint16(0) === 0x4949;
    const directory = view.getUint32(4, little);
    for (let i = 0; i < view.getUint16(directory, little); i++) {
      const entry = directory + 2 + 12 * i;
      if (view.getUint16(entry, little) === 0x0112) {
        const value = view.getUint16(entry + 8, little);
        return value >= 1 && value <= 8 ? value : 1;
      }
    }
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // a damaged directory
  }
  return 1;
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => (whole.set(part, at), at + part.length), 0);
  return whole;
}

function readJPEG(bytes) {
  const view = new DataView(bytes.buffer);
  const found = { kind: "JPEG", orientation: 1, parts: [bytes.subarray(0, 2)] };
  const tables = {}, profile = [];
  let at = 2;
  while (at + 4 <= bytes.length && bytes[at] === 0xff) {
    const marker = bytes[at + 1];
    if (marker === 0xff) { at++; continue; } // fill
    const end = at + 2 + view.getUint16(at + 2);
    if (end > bytes.length) break;
    const body = bytes.subarray(at + 4, end);
    if (marker === 0xda) break; // the pixels begin
    if (marker === 0xe1 && text(body, 0, 4) === "Exif") found.orientation = orientationOf(body.subarray(6));
    if (marker === 0xe2 && text(body, 0, 11) === "ICC_PROFILE") profile[body[12]] = body.subarray(14);
    if (marker === 0xdb) {
      for (let i = 0; i < body.length;) {
        const wide = body[i] >> 4, table = new Array(64);
        for (let k = 0; k < 64; k++) table[ZIGZAG[k]] = wide ? (body[i + 1 + 2 * k] << 8) | body[i + 2 + 2 * k] : body[i + 1 + k];
        tables[body[i] & 15] = table;
        i += wide ? 129 : 65;
      }
    }
    if (marker >= 0xc0 && marker <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(marker)) {
      found.height = (body[1] << 8) | body[2];
      found.width = (body[3] << 8) | body[4];
      found.grey = body[5] === 1;
      found.components = Array.from({ length: body[5] }, (_, i) => body[8 + 3 * i]);
    }
    if (![0xe1, 0xe2].includes(marker)) found.parts.push(bytes.subarray(at, end));
    at = end;
  }
  found.parts.push(bytes.subarray(at));
  const pieces = profile.filter(Boolean);
  if (pieces.length) found.icc = joined(pieces);
  const luma = tables[found.components?.[0]], chroma = tables[found.components?.[1]] ?? luma;
  if (luma?.every((step) => step > 0) && chroma.every((step) => step > 0)) {
    found.tables = { luma, chroma };
    found.quality = qualityOf(luma);
  }
  return found;
}

async function readPNG(bytes) {
  const view = new DataView(bytes.buffer);
  const found = { kind: "PNG", orientation: 1, parts: [bytes.subarray(0, 8)] };
  let at = 8;
  while (at + 12 <= bytes.length) {
    const end = at + 12 + view.getUint32(at), name = text(bytes, at + 4, 4);
    if (end > bytes.length) break;
    const body = bytes.subarray(at + 8, end - 4);
    if (name === "IHDR") {
      Object.assign(found, { width: view.getUint32(at + 8), height: view.getUint32(at + 12), bits: body[8], grey: [0, 4].includes(body[9]) });
    }
    if (name === "acTL" && view.getUint32(at + 8) > 1) found.animated = true;
    if (name === "eXIf") found.orientation = orientationOf(body);
    if (name === "iCCP") found.icc = await inflated(body.subarray(body.indexOf(0) + 2)).catch(() => undefined);
    if (!["iCCP", "sRGB", "gAMA", "cHRM", "cICP", "eXIf"].includes(name)) found.parts.push(bytes.subarray(at, end));
    at = end;
  }
  return found;
}

function readWebP(bytes) {
  const view = new DataView(bytes.buffer);
  const found = { kind: "WebP", orientation: 1, parts: [] };
  for (let at = 12; at + 8 <= bytes.length;) {
    const name = text(bytes, at, 4), size = view.getUint32(at + 4, true), end = at + 8 + size + (size % 2);
    const body = bytes.subarray(at + 8, at + 8 + size);
    let chunk = bytes.subarray(at, end);
    if (name === "VP8X") {
      found.animated = Boolean(body[0] & 2);
      chunk = chunk.slice();
      chunk[8] &= ~0x2c; // no profile, no EXIF, no XMP
    }
    if (name === "ICCP") found.icc = body.slice();
    if (name === "EXIF") found.orientation = orientationOf(text(body, 0, 4) === "Exif" ? body.subarray(6) : body);
    if (!["ICCP", "EXIF", "XMP "].includes(name)) found.parts.push(chunk);
    at = end;
  }
  const size = 4 + found.parts.reduce((sum, part) => sum + part.length, 0);
  const head = bytes.slice(0, 12);
  new DataView(head.buffer).setUint32(4, size, true);
  found.parts.unshift(head);
  return found;
}

async function readFormat(bytes) {
  if (bytes[0] === 0xff && bytes[1] === 0xd8) return readJPEG(bytes);
  if (text(bytes, 1, 3) === "PNG") return readPNG(bytes);
  if (text(bytes, 0, 4) === "RIFF" && text(bytes, 8, 4) === "WEBP") return readWebP(bytes);
  const head = text(bytes, 0, Math.min(bytes.length, 4096));
  const animated = (head.startsWith("GIF8") && head.includes("NETSCAPE2.0")) || head.slice(4, 12) === "ftypavis";
  return { kind: "other", orientation: 1, parts: [bytes], animated };
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function deflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new CompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// → {name, width, height, pixels (RGBA), orientation, icc, tables, quality, bits, grey, holes}
export async function readPicture(file) {
  const name = file.name || "the picture";
  if (file.size > 200e6) throw new PictureError(`${name} has more than 200 MB. Choose a smaller file.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const found = await readFormat(bytes);
  if (found.animated) throw new PictureError(`${name} is animated. Save one of its pictures, and choose that.`);
  checkSize(name, found.width ?? 0, found.height ?? 0);
  let bitmap;
  try {
    const options = { premultiplyAlpha: "none", colorSpaceConversion: "none" };
    bitmap = await createImageBitmap(new Blob(found.parts), options);
  } catch {
    throw new PictureError(`${name} is not a picture that this browser can read. Save it as PNG or JPEG, and choose that.`);
  }
  const { width, height } = bitmap;
  checkSize(name, width, height);
  if (Math.min(width, height) < 8) throw new PictureError(`${name} has ${width} × ${height} pixels. Choose one with at least 8 × 8.`);
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const pixels = context.getImageData(0, 0, width, height).data;
  let holes = false;
  for (let i = 3; i < pixels.length && !holes; i += 4) holes = pixels[i] < 128;
  const { orientation, icc, tables, quality, bits, grey } = found;
  const profile = icc && text(icc, 16, 4) === "RGB " ? icc : undefined; // pixels are saved in colour
  return { name, width, height, pixels, orientation, icc: profile, tables, quality, bits, grey, holes };
}

function checkSize(name, width, height) {
  if (width * height > MOST_PIXELS) {
    const size = Math.round((width * height) / 1e6);
    throw new PictureError(`${name} has ${size} megapixels; this page takes ${MOST_PIXELS / 1e6}. Make it smaller.`);
  }
}

// ---------------------------------------------------------------------------------------------------------
// estimates, as in ddc/estimates.py and ddc/jpegfile.py

const quantile = (values, share) => values.sort()[Math.min(values.length - 1, Math.floor(share * values.length))];

// σ of the noise, in [0, 1]: the median of the finest diagonal detail, in the blocks with least detail.
export function estimateNoise({ pixels, width, height }) {
  const left = Math.max(0, (width >> 1) - 512), top = Math.max(0, (height >> 1) - 512);
  const right = Math.min(width, left + 1025) - 2, bottom = Math.min(height, top + 1025) - 2;
  const block = new Float32Array(256), medians = [];
  for (let y0 = top; y0 + 16 <= bottom; y0 += 16) {
    for (let x0 = left; x0 + 16 <= right; x0 += 16) {
      for (let channel = 0; channel < 3; channel++) {
        let count = 0;
        for (let y = y0; y < y0 + 16; y++) {
          for (let x = x0; x < x0 + 16; x++) {
            let sum = 0, whole = true;
            for (let i = 0; i < 3; i++) {
              for (let j = 0; j < 3; j++) {
                const at = 4 * ((y + i) * width + x + j), value = pixels[at + channel];
                whole &&= value > 0 && value < 255 && pixels[at + 3] > 127;
                sum += (i === 1 ? -2 : 1) * (j === 1 ? -2 : 1) * value;
              }
            }
            if (whole) block[count++] = Math.abs(sum) / 6 / 0.6745 / 255;
          }
        }
        if (count === 256) medians.push(quantile(block, 0.5));
      }
    }
  }
  return medians.length < 20 ? 0 : quantile(Float32Array.from(medians), 0.1) / 0.871;
}

// σ of the error that JPEG left in the luma, in [0, 1]: q/√12 of a coefficient, or less where most became 0.
export function jpegNoise({ pixels, width, height, tables }) {
  if (!tables) return 0;
  const rows = Math.min(height >> 3, 64), columns = Math.min(width >> 3, 64);
  const cosine = Array.from({ length: 64 }, (_, i) =>
    Math.cos(((2 * (i % 8) + 1) * (i >> 3) * Math.PI) / 16) / (i < 8 ? Math.sqrt(8) : 2));
  const kept = new Float64Array(64), grey = new Float64Array(64), half = new Float64Array(64);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      for (let i = 0; i < 64; i++) {
        const at = 4 * ((8 * row + (i >> 3)) * width + 8 * column + (i % 8));
        grey[i] = 0.299 * pixels[at] + 0.587 * pixels[at + 1] + 0.114 * pixels[at + 2];
      }
      for (let i = 0; i < 64; i++) {
        half[i] = 0;
        for (let k = 0; k < 8; k++) half[i] += cosine[(i & 56) + k] * grey[8 * k + (i % 8)];
      }
      for (let i = 0; i < 64; i++) {
        let value = 0;
        for (let k = 0; k < 8; k++) value += half[(i & 56) + k] * cosine[8 * (i % 8) + k];
        if (Math.abs(value) >= tables.luma[i] / 2) kept[i]++;
      }
    }
  }
  let variance = 0;
  tables.luma.forEach((step, i) => {
    const share = Math.min(Math.max(kept[i] / Math.max(rows * columns, 1), 1e-6), 1 - 1e-6);
    variance += Math.min(step ** 2 / 12, 2 * (step / (2 * Math.log(1 / share))) ** 2) / 64;
  });
  return Math.sqrt(variance) / 255;
}

// ---------------------------------------------------------------------------------------------------------
// saving

// A canvas with the pixels of another one turned as the EXIF orientation says; `back` undoes that.
export function turned(source, orientation, back = false) {
  const code = back && [6, 8].includes(orientation) ? 14 - orientation : orientation;
  const { width: w, height: h } = source;
  const canvas = code > 4 ? new OffscreenCanvas(h, w) : new OffscreenCanvas(w, h);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const matrix = [[1, 0, 0, 1, 0, 0], [-1, 0, 0, 1, w, 0], [-1, 0, 0, -1, w, h], [1, 0, 0, -1, 0, h],
    [0, 1, 1, 0, 0, 0], [0, 1, -1, 0, h, 0], [0, -1, -1, 0, h, w], [0, -1, 1, 0, 0, w]][code - 1];
  context.setTransform(...matrix);
  context.drawImage(source, 0, 0);
  return canvas;
}

export function canvasOf(pixels, width, height) {
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").putImageData(new ImageData(pixels, width, height), 0, 0);
  return canvas;
}

function crc(bytes) {
  let value = ~0;
  for (const byte of bytes) {
    value ^= byte;
    for (let i = 0; i < 8; i++) value = (value >>> 1) ^ (value & 1 ? 0xedb88320 : 0);
  }
  return ~value >>> 0;
}

// The upright canvas as a file, with the colour profile of the original in place of the browser's.
export async function encoded(canvas, type, icc) {
  const blob = await canvas.convertToBlob({ type, quality: 0.95 });
  if (!icc) return blob;
  const bytes = new Uint8Array(await blob.arrayBuffer()), encoder = new TextEncoder();
  if (type === "image/png") {
    const { parts } = await readPNG(bytes);
    const content = joined([encoder.encode("iCCPprofile"), new Uint8Array(2), await deflated(icc)]);
    const chunk = new Uint8Array(content.length + 8), view = new DataView(chunk.buffer);
    view.setUint32(0, content.length - 4);
    chunk.set(content, 4);
    view.setUint32(content.length + 4, crc(content));
    return new Blob([...parts.slice(0, 2), chunk, ...parts.slice(2)], { type }); // after the header
  }
  const { parts } = readJPEG(bytes), count = Math.ceil(icc.length / 65000), segments = [];
  for (let i = 0; i < count; i++) {
    const piece = icc.subarray(65000 * i, 65000 * (i + 1)), length = piece.length + 16;
    segments.push(new Uint8Array([0xff, 0xe2, length >> 8, length & 255]), encoder.encode("ICC_PROFILE\0"), new Uint8Array([i + 1, count]), piece);
  }
  return new Blob([...parts.slice(0, 2), ...segments, ...parts.slice(2)], { type }); // after JFIF's segment
}
