// Keeps all files of the page, so that it works without a connection, and adds headers: those that isolate the page, which
// WebAssembly needs for threads, and a policy by which nothing of the page can be sent elsewhere.

const VERSION = "{{version}}";
const FILES = "{{files}}"; // small ones; the others are kept when they are first used
const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Resource-Policy": "same-origin",
  "Content-Security-Policy": "{{policy}}; frame-ancestors 'none'",
};

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(caches.open(VERSION).then((cache) => cache.addAll(FILES)));
});

self.addEventListener("activate", (event) => {
  event.waitUntil((async () => {
    for (const name of await caches.keys()) if (name !== VERSION && name.startsWith("ddc-")) await caches.delete(name);
    await self.clients.claim();
  })());
});

self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  if (event.request.method === "GET" && url.origin === self.location.origin) event.respondWith(answer(event));
});

async function answer(event) {
  const cache = await caches.open(VERSION);
  let response = await cache.match(event.request, { ignoreSearch: true });
  if (!response) {
    response = await fetch(event.request);
    if (response.status !== 200) return response;
    // kept while the page reads it; on a full disk the page works, but not offline
    event.waitUntil(cache.put(event.request, response.clone()).catch(() => {}));
  }
  const headers = new Headers(response.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  return new Response(response.body, { status: response.status, headers });
}
