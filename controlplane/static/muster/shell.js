// What every page has around it: theme, sidebar, menus of the top bar, and the palette. It compiles nothing, so pages on which
// people sign have it too.
import { parse } from "./live.js";

const find = (selector) => document.querySelector(selector);
const choose = (name, value) => {
    localStorage.setItem(name, value);
    dispatchEvent(new Event("muster:chosen"));
};

// The theme.
const themes = [...document.querySelectorAll("[data-theme-choice]")];
const showTheme = () => {
    for (const button of themes) {
        button.setAttribute("aria-pressed", String(button.dataset.themeChoice === document.documentElement.dataset.theme));
    }
};
for (const button of themes) {
    button.addEventListener("click", () => {
        choose("theme", button.dataset.themeChoice);
        showTheme();
    });
}
showTheme();

// The sidebar: narrow or wide on a desk, a drawer on a phone.
const fold = find("[data-fold]");
const drawer = find("[data-drawer]");
const isNarrow = () => document.documentElement.classList.contains("mst-narrow");
const openDrawer = (isOpen) => {
    document.body.classList.toggle("mst-drawn", isOpen);
    drawer.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) {
        (find("#sidebar a[aria-current]") ?? find("#sidebar a")).focus();
    }
};
if (fold && drawer) {
    fold.setAttribute("aria-pressed", String(isNarrow()));
    fold.addEventListener("click", () => {
        choose("sidebar", isNarrow() ? "wide" : "narrow");
        fold.setAttribute("aria-pressed", String(isNarrow()));
    });
    drawer.addEventListener("click", () => openDrawer(drawer.getAttribute("aria-expanded") !== "true"));
    find("[data-veil]").addEventListener("click", () => openDrawer(false));
}

// The menus of the top bar close on Escape and when somebody looks elsewhere.
const menus = [...document.querySelectorAll("details.mst-menu")];
document.addEventListener("click", (event) => {
    for (const menu of menus) {
        if (!menu.contains(event.target)) {
            menu.open = false;
        }
    }
});
document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") {
        return;
    }
    const open = menus.find((menu) => menu.open);
    if (open) {
        open.open = false;
        open.querySelector("summary").focus();
    } else if (document.body.classList.contains("mst-drawn")) {
        openDrawer(false);
        drawer.focus();
    }
});

// The palette.
const WAIT_MS = 60; // between two letters of one word
const palette = find("#palette");
if (palette) {
    const input = palette.querySelector("input");
    const list = palette.querySelector("[role=listbox]");
    const none = palette.querySelector("[role=status]");
    let chosen = -1;
    let timer = 0;
    let asked = new AbortController();

    const options = () => [...list.querySelectorAll("[role=option]")];
    const mark = (index) => {
        const all = options();
        chosen = all.length === 0 ? -1 : (index + all.length) % all.length;
        all.forEach((option, at) => option.setAttribute("aria-selected", String(at === chosen)));
        if (chosen >= 0) {
            input.setAttribute("aria-activedescendant", all[chosen].id);
            all[chosen].scrollIntoView({ block: "nearest" });
        } else {
            input.removeAttribute("aria-activedescendant");
        }
    };
    const show = (found, words) => {
        list.replaceChildren(...found);
        const isEmpty = options().length === 0;
        input.setAttribute("aria-expanded", String(!isEmpty));
        none.textContent = isEmpty && words ? palette.dataset.none.replace("{words}", words) : "";
        mark(0);
    };
    const look = async () => {
        asked.abort();
        asked = new AbortController();
        const words = input.value.trim();
        try {
            const answer = await fetch(`${palette.dataset.find}?${new URLSearchParams({ s: words })}`, { signal: asked.signal });
            if (answer.redirected) {
                location.reload(); // signed out meanwhile
            } else if (answer.ok) {
                show(parse(await answer.text()).body.children, words);
            }
        } catch (error) {
            if (error.name !== "AbortError") {
                show([], words);
            }
        }
    };
    const open = () => {
        if (!palette.open) {
            palette.showModal();
            input.select();
            look();
        }
    };
    input.addEventListener("input", () => {
        clearTimeout(timer);
        timer = setTimeout(look, WAIT_MS);
    });
    input.addEventListener("keydown", (event) => {
        if (event.key === "Escape") {
            event.preventDefault(); // a search field would only empty itself
            palette.close();
        }
        const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (step) {
            event.preventDefault();
            mark(chosen + step);
        } else if (event.key === "Enter" && chosen >= 0) {
            event.preventDefault();
            const { href } = options()[chosen];
            if (event.metaKey || event.ctrlKey) {
                window.open(href, "_blank", "noopener");
            } else {
                location.assign(href);
            }
        }
    });
    palette.addEventListener("click", (event) => {
        if (event.target === palette) {
            palette.close();
        }
    });
    find("[data-palette]").addEventListener("click", open);
    document.addEventListener("keydown", (event) => {
        if (event.key.toLowerCase() === "k" && (event.metaKey || event.ctrlKey) && !event.shiftKey && !event.altKey) {
            event.preventDefault();
            open();
        }
    });
}
