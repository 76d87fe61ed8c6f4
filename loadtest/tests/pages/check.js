// Looks at an open page as a reader would and returns what is wrong with it, as a list of sentences.
(isDark => {
  const problems = [];
  const say = (element, what) => {
    const text = (element.textContent || "").trim().slice(0, 40);
    problems.push(`${element.nodeName} "${text}" ${what}`);
  };
  const all = (root, selector) => [...root.querySelectorAll(selector)];
  const overlap = (a, b) =>
    Math.min(Math.min(a.right, b.right) - Math.max(a.left, b.left), Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));

  // Light or dark as the reader's system is.
  if (matchMedia("(prefers-color-scheme: dark)").matches !== isDark) problems.push("the colour scheme was not set");
  const parse = colour => (colour.match(/[\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => {
    const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  if ((luminance(ground(document.body)) < 0.5) !== isDark) problems.push("the page's ground is of the other scheme");
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };

  // Text: inside of the window or of what scrolls, not cut off, not over other text, large and clear enough to read.
  if (document.documentElement.scrollWidth > innerWidth) problems.push("the page is wider than the window");
  for (const scroller of all(document, ".wide")) {
    if (innerWidth >= 1200 && scroller.scrollWidth > scroller.clientWidth) say(scroller, "does not fit a wide window");
  }
  const hasText = element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  const texts = all(document.body, "*").filter(element => hasText(element) && element.nodeName !== "title");
  if (texts.length < 10) problems.push("the page holds hardly any text");
  const boxes = texts.map(element => {
    const range = document.createRange();
    range.selectNodeContents(element);
    return element.ownerSVGElement ? element.getBoundingClientRect() : range.getBoundingClientRect();
  });
  texts.forEach((element, index) => {
    const [box, svg, style] = [boxes[index], element.ownerSVGElement, getComputedStyle(element)];
    const scrolls = element.closest(".wide");
    const outer = svg ? svg.getBoundingClientRect() : scrolls ? null : { left: 0, right: innerWidth, top: 0, bottom: 1e9 };
    const inside = !outer || (box.left >= outer.left - 1 && box.right <= outer.right + 1 && box.top >= outer.top - 1 &&
      box.bottom <= outer.bottom + 1);
    if (!inside) say(element, `is cut off: ${JSON.stringify(box)} in ${JSON.stringify(outer)}`);
    const frame = element.closest("td, th, .tile, li, p, h1, h2");
    if (!svg && frame && box.right > frame.getBoundingClientRect().right + 1) say(element, "sticks out of its frame");
    const scale = svg ? svg.getScreenCTM().a : 1;
    if (parseFloat(style.fontSize) * scale < 9) say(element, `is ${parseFloat(style.fontSize) * scale} pixels high`);
    const clear = contrast(parse(svg ? style.fill : style.color), ground(element));
    if (clear < 4.5) say(element, `has a contrast of ${clear.toFixed(2)}`);
    for (let other = 0; other < index; other++) {
      const nested = texts[other].contains(element) || element.contains(texts[other]);
      if (!nested && overlap(box, boxes[other]) > 1) say(element, `lies over "${texts[other].textContent.trim()}"`);
    }
  });

  // Plots: titles, named axes with ticks and units, a legend for every line, lines that can be seen.
  for (const plot of all(document, "svg")) {
    const words = selector => all(plot, selector).map(element => element.textContent.trim()).filter(Boolean);
    const [title] = words(".plot-title");
    if (!title) say(plot, "has no title");
    for (const axis of ["x", "y"]) {
      const [label] = words(`.axis.${axis}`);
      if (!label) problems.push(`"${title}" has no name on its ${axis} axis`);
      else if (!/(, (ms|s|%)|\/ s( a \w+)?|^(requests|sequences|workers|GPUs))(, logarithmic)?$/.test(label))
        problems.push(`"${title}" has no unit on its ${axis} axis: ${label}`);
      if (words(`.tick.${axis}`).length < 2) problems.push(`"${title}" has no ticks on its ${axis} axis`);
    }
    const lines = all(plot, "polyline");
    if (words(".legend").length !== lines.length) problems.push(`"${title}" has ${words(".legend").length} legends`);
    for (const line of [...lines, ...all(plot, "circle")]) {
      const style = getComputedStyle(line);
      const clear = contrast(parse(line.nodeName === "circle" && !line.matches(".hollow") ? style.fill : style.stroke), ground(plot));
      if (!(clear >= 3)) problems.push(`a ${line.nodeName} of "${title}" has a contrast of ${clear}`);
    }
  }
  return problems;
})
