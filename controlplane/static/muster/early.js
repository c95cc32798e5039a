// Runs before the first paint, so it is no module: the theme and the width of the sidebar that this browser chose.
(() => {
    const root = document.documentElement;
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const show = () => {
        const chosen = localStorage.getItem("theme") ?? "auto";
        root.dataset.theme = chosen;
        root.classList.toggle("dark", chosen === "dark" || (chosen === "auto" && dark.matches));
        root.classList.toggle("mst-narrow", localStorage.getItem("sidebar") === "narrow");
    };
    show();
    dark.addEventListener("change", show);
    addEventListener("storage", show);
    addEventListener("muster:chosen", show);
})();
