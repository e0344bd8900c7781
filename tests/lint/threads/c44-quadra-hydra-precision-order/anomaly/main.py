import hydra
import lightning.pytorch as pl
from omegaconf import DictConfig, OmegaConf


@hydra.main(version_base="1.3", config_path="../configs", config_name="config")
def main(cfg: DictConfig):
    pl.seed_everything(cfg.seed)
    print(OmegaConf.to_yaml(cfg, resolve=True))
    dm = hydra.utils.instantiate(cfg.datamodule)
    model = hydra.utils.instantiate(cfg.model)
    trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(model, dm)
    trainer.test(model, dm)
    trainer.save_checkpoint("padim.ckpt")


if __name__ == "__main__":
    main()
