import sys,json
from tests.finetune.test_memory import *
def show(name, ranks):
    for r,(p,h,k) in enumerate(ranks):
        bad={x:(p[x],h[x]) for x in h if p[x]!=h[x]}
        print(name, r, "OK" if not bad else bad, "act pred", p["activations"], "meas", k["layers"]+k["around"], round(p["activations"]/(k["layers"]+k["around"]),4), k, flush=True)
if __name__=="__main__":
    with RankPool(2,timeout=500) as pool:
        for lay,s in LAYOUTS.items():
            for opt in ("adamw_torch_fused","adamw_8bit"):
                for lora in (None,LORA):
                    n=(lay,opt,"lora" if lora else "full")
                    try:
                        if lay=="one": r=[measured(llama(),s,opt,lora)]
                        else: r=pool.run(measured,llama(),s,opt,lora)
                        show(n,r)
                    except Exception as e: print(n,"FAIL",str(e)[-1500:],flush=True)
