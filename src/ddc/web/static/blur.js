// Blurs, as in ddc/operators/blur.py.

// A kernel of side × side numbers with the sum 1, and its reach in pixels.
export function blurKernel(shape, amount, degrees, side) {
  const middle = side >> 1, kernel = new Float32Array(side * side), turn = (degrees * Math.PI) / 180;
  const within = (value) => Math.min(Math.max(value, 0), 1);
  const weight = {
    soft: (x, y) => Math.exp(-0.5 * ((x * x + y * y) / amount ** 2)),
    disc: (x, y) => {
      let inside = 0;
      for (let i = 0; i < 256; i++) inside += Math.hypot(x + ((i % 16) + 0.5) / 16 - 0.5, y + ((i >> 4) + 0.5) / 16 - 0.5) <= amount;
      return inside;
    },
    line: (x, y) => {
      const along = x * Math.cos(turn) - y * Math.sin(turn), across = x * Math.sin(turn) + y * Math.cos(turn);
      return within(amount / 2 + 0.5 - Math.abs(along)) * within(1 - Math.abs(across));
    },
  }[shape];
  kernel.forEach((_, i) => (kernel[i] = weight((i % side) - middle, Math.floor(i / side) - middle)));
  const total = kernel.reduce((sum, value) => sum + value, 0);
  kernel.forEach((value, i) => (kernel[i] = value / total));
  const outside = (reach) => kernel.reduce((sum, value, i) =>
    sum + (Math.max(Math.abs((i % side) - middle), Math.abs(Math.floor(i / side) - middle)) > reach ? value : 0), 0);
  let reach = 0;
  while (reach < middle && outside(reach) > 0.01) reach++;
  return { kernel, reach };
}

// u, s and v of a Gaussian blur along one side of a picture, by one-sided Jacobi rotations: A v = u s. Matrices are by rows.
export function singularVectors(width, side) {
  const columns = Array.from({ length: side }, (_, k) => cosine(k, side)), blurred = columns.map((column) => gaussian(column, width));
  const dot = (a, b) => {
    let sum = 0;
    for (let i = 0; i < side; i++) sum += a[i] * b[i];
    return sum;
  };
  const rotate = (a, b, cos, sin) => {
    for (let i = 0; i < side; i++) {
      const first = a[i];
      a[i] = cos * first - sin * b[i];
      b[i] = sin * first + cos * b[i];
    }
  };
  for (let sweep = 0, turned = true; turned && sweep < 30; sweep++) {
    turned = false;
    for (let p = 0; p < side; p++) {
      for (let q = p + 1; q < side; q++) {
        const common = dot(blurred[p], blurred[q]);
        if (Math.abs(common) < 1e-18) continue; // both are faint
        const a = dot(blurred[p], blurred[p]), b = dot(blurred[q], blurred[q]);
        if (Math.abs(common) <= 1e-9 * Math.sqrt(a * b)) continue;
        const ratio = (b - a) / (2 * common), tangent = (ratio < 0 ? -1 : 1) / (Math.abs(ratio) + Math.hypot(1, ratio));
        const cos = 1 / Math.hypot(1, tangent), sin = cos * tangent;
        rotate(blurred[p], blurred[q], cos, sin);
        rotate(columns[p], columns[q], cos, sin);
        turned = true;
      }
    }
  }
  const norms = blurred.map((column) => Math.sqrt(dot(column, column)));
  const order = norms.map((_, k) => k).sort((a, b) => norms[b] - norms[a]);
  const u = new Float32Array(side * side), v = new Float32Array(side * side), s = Float32Array.from(order, (k) => norms[k]);
  order.forEach((k, place) => {
    for (let i = 0; i < side; i++) {
      u[i * side + place] = blurred[k][i] / Math.max(norms[k], 1e-12);
      v[i * side + place] = columns[k][i];
    }
  });
  return { u, s, v };
}

// A cosine, with which the rotations begin, because the singular vectors are nearly cosines.
function cosine(k, side) {
  return Float64Array.from({ length: side }, (_, i) => Math.cos((Math.PI * k * (i + 0.5)) / side) * Math.sqrt((k ? 2 : 1) / side));
}

// A column blurred by a Gaussian of 61 taps, and mirrored at its ends.
function gaussian(column, width) {
  const side = column.length, period = 2 * (side - 1), taps = Array.from({ length: 61 }, (_, k) => Math.exp(-0.5 * ((k - 30) / width) ** 2));
  const total = taps.reduce((sum, tap) => sum + tap, 0);
  return column.map((_, i) => taps.reduce((sum, tap, k) => {
    const place = (i + k - 30 + 4 * period) % period; // 4: the picture may be small
    return sum + (tap / total) * column[Math.min(place, period - place)];
  }, 0));
}
