// In place of the server's: every request of the chat is kept in `asked`, and answered as the test says.
window.asked = [];
const real = window.fetch;
window.clock = 0;
performance.now = () => window.clock;
window.fetch = (path, options) => {
  const { signal, body } = options;
  if (!body) return real(path, options);
  const encoder = new TextEncoder();
  let controller;
  const stream = new ReadableStream({ start(it) { controller = it; } });
  const send = event => controller.enqueue(encoder.encode(`data: ${event}\n\n`));
  const request = {
    path, body: JSON.parse(body), aborted: false, send,
    piece: content => send(JSON.stringify({ choices: [{ delta: { content }, text: content }] })),
    end: tokens => {
      send(JSON.stringify({ choices: [], usage: { completion_tokens: tokens } }));
      send('[DONE]');
    },
  };
  signal.addEventListener('abort', () => { request.aborted = true; controller.error(signal.reason); });
  window.asked.push(request);
  return Promise.resolve(new Response(stream));
};
// What the user does and sees. The page reads streams in tasks of its own, which come before a timer's, and draws them
// before the next frame.
window.settle = () => new Promise(resolve => setTimeout(() => requestAnimationFrame(() => setTimeout(resolve)), 50));
window.type = (words, key = 'Enter') => {
  const box = document.getElementById('text');
  box.value = words;
  box.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
};
window.press = id => document.getElementById(id).click();
window.seen = () => document.getElementById('log').innerText;
window.shown = id => document.getElementById(id).offsetParent !== null;
