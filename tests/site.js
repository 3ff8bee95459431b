// Runs in the browser, in a page that defines `plan`: opens each page in a frame as wide as a phone, then the search page for
// each word, and sends what it has found.
const found = {wide: {}, formulas: {}, searched: {}, dead: {}};
const pause = ms => new Promise(done => setTimeout(done, ms));

async function open(frame, url) {
  await new Promise(done => { frame.onload = done; frame.src = url; });
  return frame.contentDocument;
}

// Elements that reach beyond the window, unless something around them scrolls.
function culprits(page) {
  const scrolls = node => node && (["auto", "scroll", "hidden"].includes(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  return [...page.querySelectorAll("article *")]
    .filter(node => node.getBoundingClientRect().right > plan.width + 1 && !scrolls(node.parentElement))
    .slice(0, 3).map(node => node.outerHTML.slice(0, 120));
}

// The site's own addresses that a page links or shows; what is no address of the web is dead.
function addresses(page, name) {
  const written = [...page.querySelectorAll("a[href], img[src]")].map(node => node.getAttribute("href") ?? node.getAttribute("src"));
  const wrong = written.filter(each => !URL.canParse(each, page.baseURI) || !/^http/.test(new URL(each, page.baseURI).protocol));
  for (const each of wrong) found.dead[each] = [name];
  return written.filter(each => !wrong.includes(each)).map(each => new URL(each, page.baseURI)).filter(url => url.origin === location.origin);
}

async function results(page) {
  const box = page.querySelector("#search-results");
  for (let i = 0; i < 100 && !/\d|not match/.test(box.querySelector("p")?.textContent ?? ""); i++) await pause(50);
  return [...box.querySelectorAll("ul.search a")].slice(0, 5).map(link => link.getAttribute("href"));
}

async function look() {
  const frame = document.querySelector("iframe"), linked = {}, places = {}, answers = {};
  for (const name of plan.pages) {
    const page = await open(frame, name), width = page.documentElement.scrollWidth, beyond = culprits(page);
    if (width > plan.width || beyond.length) found.wide[name] = [width, ...beyond];
    for (const desk of plan.desks) {
      frame.width = desk;
      if (page.documentElement.scrollWidth > desk) found.wide[name] = [page.documentElement.scrollWidth, `at ${desk}`];
    }
    frame.width = plan.width;
    for (const url of addresses(page, name)) (linked[url.pathname + url.hash] ??= []).push(name);
    places["/" + name] = new Set([...page.querySelectorAll("[id]")].map(node => "#" + node.id));
    found.formulas[name] = [...page.querySelectorAll("math")].filter(each => each.getBoundingClientRect().height > 5).length;
  }
  for (const [address, from] of Object.entries(linked)) {
    const [path, place] = address.split("#");
    answers[path] ??= (await fetch(path, {method: "HEAD"})).ok;
    if (!answers[path] || place && places[path] && !places[path].has("#" + decodeURIComponent(place))) found.dead[address] = from.slice(0, 3);
  }
  for (const word of plan.words) found.searched[word] = await results(await open(frame, "search.html?q=" + encodeURIComponent(word)));
}

look().catch(error => { found.error = String(error); }).then(() => fetch("/found", {method: "POST", body: JSON.stringify(found)}));
