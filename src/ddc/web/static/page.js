// The page: what a visitor sees and does. Pictures are restored in worker.js.

import { blurKernel } from "./blur.js";
import { MOST_PIXELS, PictureError, canvasOf, encoded, estimateNoise, jpegNoise, readPicture, standardTables, turned } from "./picture.js";

const NOTICEABLE = 0.02; // σ of noise; weaker noise may be the picture's own detail
const COARSE = 85; // JPEG quality below which artefacts are worth removing
const get = (id) => document.getElementById(id);
const form = get("form"), slider = get("slider"), canvas = get("brush");

let picture; // what readPicture returns, with the file
let restoring; // the one that is being restored; another may be chosen meanwhile
let worker, engine, busy;
let painted = false;

// ---------------------------------------------------------------------------------------------------------
// the service worker caches all files, and adds the headers that WebAssembly needs for threads

async function start() {
  if (typeof WebAssembly !== "object" || typeof OffscreenCanvas !== "function" || typeof DecompressionStream !== "function") {
    get("engine").textContent = "This browser is too old for this page: it needs WebAssembly, OffscreenCanvas and DecompressionStream.";
    return;
  }
  if ("serviceWorker" in navigator) {
    try {
      await navigator.serviceWorker.register("sw.js");
      await navigator.serviceWorker.ready;
      if (!crossOriginIsolated && !sessionStorage.getItem("reloaded")) {
        sessionStorage.setItem("reloaded", "1"); // once: some browsers never isolate a page
        location.reload();
        return;
      }
    } catch { /* in private windows, or without HTTPS: the page works, but not offline */ }
  }
  startWorker();
  await showExamples();
}

function startWorker() {
  worker?.terminate();
  engine = undefined;
  setBusy(false);
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.engine) ready(data.engine);
    if ("fraction" in data) progress(data.fraction, data.text);
    if (data.done) finish(data.done);
    if (data.error) fail(data.error);
  };
  worker.onerror = (event) => fail(event.message || "The worker could not be started. Load the page again.");
  worker.postMessage({ load: location.hash.slice(1) || "auto" });
}

function ready(found) {
  engine = found;
  get("progress").hidden = true;
  const where = engine.webgpu ? "the graphics card (WebGPU)" : `the processor (WebAssembly, ${engine.threads} ${engine.threads > 1 ? "threads" : "thread"})`;
  const slow = !engine.webgpu && !crossOriginIsolated
    ? " This browser or server allows one thread only, which is slow: serve the page over HTTPS, or with the headers Cross-Origin-Opener-Policy and Cross-Origin-Embedder-Policy." : "";
  get("engine").textContent = `Ready. Pictures are restored by ${where}.${slow}`;
  get("summary").textContent = "";
  update();
}

// ---------------------------------------------------------------------------------------------------------
// a picture arrives

async function take(file, suggestion = {}) {
  if (!file) return;
  get("problem").textContent = get("summary").textContent = "";
  get("compare").hidden = get("save").hidden = true;
  get("facts").textContent = "Reading the picture …";
  try {
    picture = await readPicture(file);
  } catch (error) {
    picture = undefined;
    get("facts").textContent = "";
    get("picture").hidden = true;
    get("problem").textContent = error instanceof PictureError ? error.message : `The picture could not be read (${error.message}).`;
    update();
    return;
  }
  show(get("picture"), file);
  get("picture").hidden = false;
  picture.file = file;
  picture.noise = estimateNoise(picture);
  picture.jpegNoise = jpegNoise(picture);
  const facts = [`${picture.name}, ${picture.width} × ${picture.height} pixels`];
  if (picture.quality) facts.push(`JPEG of quality ${picture.quality}`);
  if (picture.holes) facts.push("transparent pixels, which can be filled");
  facts.push(picture.noise >= NOTICEABLE ? `noise of about ${picture.noise.toFixed(3)}` : "no noticeable noise");
  if (picture.bits === 16) facts.push("16 bits a channel, of which 8 are kept");
  get("facts").textContent = `${facts.join(", ")}.`;
  const kind = picture.holes ? "holes" : picture.quality < COARSE ? "jpeg" : picture.noise >= NOTICEABLE ? "noise" : "size";
  const scale = Math.max(picture.width, picture.height) <= 256 ? 4 : 2;
  const sigma = picture.noise >= NOTICEABLE && kind === "noise" ? picture.noise.toFixed(3) : 0;
  for (const [name, value] of Object.entries({ kind, scale, sigma, quality: picture.quality ?? 10, ...suggestion })) form.elements[name].value = value;
  clearPainting();
  update();
}

function show(image, blob) {
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(blob);
}

async function showExamples() {
  const response = await fetch("examples/examples.json").catch(() => null);
  for (const { file, ...suggestion } of response?.ok ? await response.json() : []) {
    const button = document.createElement("button"), image = new Image();
    image.src = `examples/${file}`;
    image.alt = `Example: ${file.replace(/\.\w+$/, "").replaceAll("-", " ")}`;
    button.type = "button";
    button.append(image);
    button.onclick = async () => take(new File([await (await fetch(image.src)).blob()], file), suggestion);
    get("examples").append(button);
    get("examples").hidden = false;
  }
}

// ---------------------------------------------------------------------------------------------------------
// the form

function update() {
  const kind = form.elements.kind.value;
  for (const part of form.querySelectorAll("[data-kind]")) part.hidden = !part.dataset.kind.split(" ").includes(kind);
  for (const part of form.querySelectorAll("[data-shape]")) part.hidden = part.dataset.shape !== form.elements.shape.value;
  for (const output of form.querySelectorAll("output")) output.textContent = output.previousElementSibling.value;
  const limits = { soft: 4, disc: 12, line: 25 }; // what a kernel has room for
  form.elements.blur.max = limits[form.elements.shape.value];
  get("restore").disabled = !picture || !engine || busy;
  get("stop").disabled = !busy;
}

function jobOf() {
  const { pixels, width, height, grey } = picture, field = form.elements, kind = field.kind.value;
  const scale = kind === "size" ? Number(field.scale.value) : 1;
  if (width * height * scale ** 2 > MOST_PIXELS) {
    const size = Math.round((width * height * scale ** 2) / 1e6);
    throw new PictureError(`The result would have ${size} megapixels; this page makes ${MOST_PIXELS / 1e6}. Enlarge it less, or choose a smaller picture.`);
  }
  const job = { graph: kind === "size" ? `sr${scale}` : kind, pixels, width, height, grey, conditions: new Float32Array(9) };
  job.sigma = ["holes", "jpeg"].includes(kind) ? 0 : Number(field.sigma.value);
  if (["size", "blur", "noise"].includes(kind) && picture.quality) {
    job.sigma = Math.hypot(job.sigma, picture.jpegNoise);
    job.conditions[2] = (100 - picture.quality) / 100;
  }
  if (kind === "jpeg") job.tables = Number(field.quality.value) === picture.quality ? picture.tables : standardTables(Number(field.quality.value));
  if (kind === "blur") {
    const shape = field.shape.value, amount = Number(field.blur.value);
    if (shape === "soft") Object.assign(job, { graph: "gauss", amount });
    Object.assign(job, blurKernel(shape, amount, Number(field.angle.value), engine.kernel));
  }
  if (kind === "holes") job.holes = holesOf();
  return job;
}

form.onsubmit = (event) => {
  event.preventDefault();
  get("problem").textContent = "";
  try {
    const job = jobOf();
    restoring = picture;
    setBusy(true);
    progress(0, "Preparing …");
    get("progress").scrollIntoView({ block: "nearest" }); // on a phone it lies below the form
    worker.postMessage({ restore: job });
  } catch (error) {
    fail(error.message);
  }
};

form.oninput = update;
get("stop").onclick = () => {
  startWorker(); // the only way to end a run
  get("summary").textContent = "Stopped.";
};

function setBusy(value) {
  busy = value;
  update();
}

function progress(fraction, text) {
  get("progress").hidden = false;
  get("progress").value = fraction;
  if (text) get("summary").textContent = text;
}

function fail(message) {
  get("problem").textContent = message;
  get("progress").hidden = true;
  get("summary").textContent = "";
  setBusy(false);
}

async function finish({ pixels, width, height, seconds, tiles, webgpu }) {
  const upright = turned(canvasOf(pixels, width, height), restoring.orientation);
  const stem = `${restoring.name.replace(/\.\w+$/, "")}-restored`;
  const png = await encoded(upright, "image/png", restoring.icc), jpg = await encoded(upright, "image/jpeg", restoring.icc);
  for (const [id, blob, end] of [["png", png, "png"], ["jpg", jpg, "jpg"]]) {
    URL.revokeObjectURL(get(id).href);
    Object.assign(get(id), { href: URL.createObjectURL(blob), download: `${stem}.${end}` });
  }
  show(get("after"), png);
  show(get("before"), restoring.file);
  get("compare").hidden = get("save").hidden = false;
  get("progress").hidden = true;
  compare();
  get("compare").scrollIntoView({ block: "nearest" });
  const where = webgpu ? "WebGPU" : "WebAssembly";
  get("summary").textContent = `${upright.width} × ${upright.height} pixels, in ${seconds.toFixed(1)} s with ${where}, ${tiles} ${tiles > 1 ? "tiles" : "tile"}.`;
  setBusy(false);
}

// ---------------------------------------------------------------------------------------------------------
// before and after

function compare() {
  get("before").style.clipPath = `inset(0 ${100 - slider.value}% 0 0)`;
}

slider.oninput = compare;
get("stage").onpointermove = (event) => {
  if (event.pointerType === "mouse" && !event.buttons) return;
  const box = get("stage").getBoundingClientRect();
  slider.value = (100 * (event.clientX - box.left)) / box.width;
  compare();
};
get("stage").ondragstart = (event) => event.preventDefault();

// ---------------------------------------------------------------------------------------------------------
// the brush; the painting is upright, as the picture is shown

const brush = canvas.getContext("2d"), layer = new OffscreenCanvas(1, 1), paint = layer.getContext("2d", { willReadFrequently: true });
let background, cursor = { x: 0, y: 0 }, last;

function clearPainting() {
  background = turned(canvasOf(picture.pixels, picture.width, picture.height), picture.orientation);
  const scale = Math.min(1, 768 / Math.max(background.width, background.height));
  canvas.width = layer.width = Math.max(1, Math.round(background.width * scale));
  canvas.height = layer.height = Math.max(1, Math.round(background.height * scale));
  cursor = { x: canvas.width / 2, y: canvas.height / 2 };
  painted = false;
  draw();
}

function draw() {
  brush.clearRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(background, 0, 0, canvas.width, canvas.height);
  brush.globalAlpha = 0.7;
  brush.drawImage(layer, 0, 0);
  brush.globalAlpha = 1;
  if (document.activeElement !== canvas) return;
  brush.strokeStyle = "#ff2d78";
  brush.beginPath();
  brush.arc(cursor.x, cursor.y, Number(form.elements.width.value) / 2, 0, 7);
  brush.stroke();
}

function stroke(from, to) {
  Object.assign(paint, { strokeStyle: "#ff2d78", lineCap: "round", lineWidth: Number(form.elements.width.value) });
  paint.beginPath();
  paint.moveTo(from.x, from.y);
  paint.lineTo(to.x + 0.01, to.y); // browsers draw no line without length
  paint.stroke();
  painted = true;
  draw();
}

function pointOf(event) {
  const box = canvas.getBoundingClientRect();
  return { x: ((event.clientX - box.left) / box.width) * canvas.width, y: ((event.clientY - box.top) / box.height) * canvas.height };
}

canvas.onpointerdown = (event) => {
  canvas.setPointerCapture(event.pointerId);
  last = cursor = pointOf(event);
  stroke(last, last);
};
canvas.onpointermove = (event) => {
  if (!last) return;
  cursor = pointOf(event);
  stroke(last, cursor);
  last = cursor;
};
canvas.onpointerup = canvas.onpointercancel = () => (last = undefined);
canvas.onfocus = canvas.onblur = () => picture && draw();
canvas.onkeydown = (event) => {
  const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], " ": [0, 0] }[event.key];
  if (!move || !picture) return;
  event.preventDefault();
  const step = event.shiftKey ? 24 : 6;
  cursor = { x: Math.min(Math.max(cursor.x + step * move[0], 0), canvas.width), y: Math.min(Math.max(cursor.y + step * move[1], 0), canvas.height) };
  if (event.key === " ") stroke(cursor, cursor);
  else draw();
};
get("unpaint").onclick = () => picture && clearPainting();

// 1 where the picture is to be filled: painted or transparent pixels, in the order in which they are stored.
function holesOf() {
  const { width, height, pixels, orientation } = picture;
  const large = new OffscreenCanvas(background.width, background.height), context = large.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(layer, 0, 0, large.width, large.height);
  const mask = turned(large, orientation, true).getContext("2d").getImageData(0, 0, width, height).data;
  const holes = new Uint8Array(width * height);
  let count = 0;
  holes.forEach((_, i) => count += holes[i] = pixels[4 * i + 3] < 128 || (painted && mask[4 * i + 3] > 127) ? 1 : 0);
  if (!count) throw new PictureError("Nothing is painted. Paint over what is to be filled, and try again.");
  if (count === holes.length) throw new PictureError("The whole picture is painted over. Leave some of it, and try again.");
  return holes;
}

// ---------------------------------------------------------------------------------------------------------
// files come from the field, by drag and drop, or from the clipboard

get("file").onchange = (event) => {
  const file = event.target.files[0];
  event.target.value = ""; // so that the same file can be chosen again
  take(file);
};
document.ondragover = (event) => {
  event.preventDefault();
  get("drop").classList.add("over");
};
document.ondragleave = () => get("drop").classList.remove("over");
document.ondrop = (event) => {
  event.preventDefault();
  get("drop").classList.remove("over");
  takeFirst(event.dataTransfer.files);
};
document.onpaste = (event) => takeFirst(event.clipboardData.files);

async function takeFirst(files) {
  const count = files.length; // the list is empty afterwards
  await take(files[0]);
  if (count > 1 && picture) get("facts").textContent += ` It is the first of ${count} pictures: the page takes one at a time.`;
}

start();
update();
