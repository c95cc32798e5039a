"""Operations: asked for, decided about, carried out, proved. Every change of their rows is made here."""
